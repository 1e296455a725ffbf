# SPDX-License-Identifier: Apache-2.0
"""Servers of several data-parallel ranks at one URL: each rank is an agent, and gets what is meant for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.standins.engines import Fabric, RankedVllmServer
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 4, "seed": 7}


@dataclass(slots=True)
class Ranked:
    """A pair of servers with ranks, and the proxy before them."""

    stage: Stage
    prefill: RankedVllmServer
    decode: RankedVllmServer
    fabric: Fabric = field(default_factory=Fabric)

    async def states(self) -> dict[str, str]:
        """Breakers by the agent's place in its server: role and rank."""
        async with self.stage.http.get(f"{self.stage.proxy.url}/nodes") as response:
            nodes = (await response.json())["nodes"]
        return {f"{node['role']} {node['dp_rank']}": node["breaker"] for node in nodes}


@pytest.fixture
async def ranked(start_stage: StartStage, request: pytest.FixtureRequest) -> AsyncIterator[Ranked]:
    """A test can give the prefill server's settings as the fixture's parameter."""
    stage, fabric = await start_stage(retries=0, breaker_failures=1), Fabric()
    servers = [
        await stage.bring(
            RankedVllmServer(role=role, proxies=(stage.discovery,), fabric=fabric, **settings)  # type: ignore[arg-type]
        )
        for role, settings in (("prefill", getattr(request, "param", {})), ("decode", {}))
    ]
    for server in servers:
        await server.until(lambda server=server: server.acks >= server.ranks)
    prefill, decode = servers
    yield Ranked(stage, prefill, decode, fabric)
    await stage.assert_quiescent()
    assert not fabric.wrongs


async def ask(ranked: Ranked, count: int, **changes: Any) -> list[int]:
    return [(await ranked.stage.ask(BODY | changes))[0] for _ in range(count)]


async def test_each_rank_is_an_agent_that_gets_its_share(ranked: Ranked) -> None:
    assert await ask(ranked, 8) == [200] * 8
    for server in (ranked.prefill, ranked.decode):
        assert sorted(server.served) == [0] * 4 + [1] * 4
    assert set(await ranked.states()) == {"prefill 0", "prefill 1", "decode 0", "decode 1"}


@pytest.mark.parametrize("ranked", [{"broken": {1}}], indirect=True)
async def test_a_rank_that_fails_leaves_the_other_in_rotation(ranked: Ranked) -> None:
    statuses = await ask(ranked, 6)
    assert sorted(statuses) == [200] * 5 + [502]
    assert await ranked.states() == {
        "prefill 0": "closed",
        "prefill 1": "open",
        "decode 0": "closed",
        "decode 1": "closed",
    }


@pytest.mark.parametrize("ranked", [{"honours_header": False}], indirect=True)
async def test_a_rank_that_is_sent_another_ones_leg_is_found_out(ranked: Ranked) -> None:
    """Whatever stands between the proxy and the server does not pass the header on."""
    for _ in range(2):  # rank 0 may have the first turn
        status, answer = await ranked.stage.ask(BODY)
        if status != 200:
            break
    assert (status, answer["error"]["code"]) == (502, "agent_lost")
    assert "served by another rank" in answer["error"]["message"]
    assert len(ranked.decode.asked) == len(ranked.prefill.asked) - 1, "nothing is decoded of it"
    await ranked.stage.proxy.services.drops.settle()
    assert [rank for rank, _ in ranked.prefill.rank_dropped] == [1]
    assert (await ranked.states())["prefill 1"] == "open"
    assert await ask(ranked, 4) == [200] * 4, "the rank that is reached serves all"


async def test_a_client_that_leaves_has_the_rank_that_lends_drop_its_kv(ranked: Ranked) -> None:
    ranked.decode.hold_s = 30.0
    for _ in range(2):
        asking = asyncio.ensure_future(ranked.stage.ask(BODY))
        seen = len(ranked.decode.asked)
        await ranked.decode.until(lambda seen=seen: len(ranked.decode.asked) > seen)
        asking.cancel()
        await asyncio.wait([asking])
    await ranked.prefill.until(lambda: len(ranked.prefill.rank_dropped) == 2)
    assert sorted(rank for rank, _ in ranked.prefill.rank_dropped) == [0, 1]
