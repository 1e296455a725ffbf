# SPDX-License-Identifier: Apache-2.0
"""W2: no prefill agent is ready, and decode agents serve alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet, FleetSettings
from kvferry.proxy.fleet.routing.routing_request import RoutingRequest
from kvferry.proxy.telemetry.metrics import Metrics
from tests.standins.agents import Fault, StandInAgent
from tests.unit.proxy.builders import registration
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 6, "seed": 7}
LONG = {**BODY, "prompt": "long " * 500}
CHAT = {"model": "stand-in", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 7}
DECODE_ONLY = "kvferry_proxy_decode_only_requests_total"


async def ready(stage: Stage) -> tuple[int, dict[str, Any]]:
    async with stage.http.get(f"{stage.proxy.url}/ready") as response:
        return response.status, await response.json()


def legs(agent: StandInAgent) -> list[str]:
    return [asked.leg for asked in agent.asked]


async def test_every_kind_of_request_is_served(stage: Stage) -> None:
    decode = await stage.agent("decode")
    assert await ready(stage) == (200, {"ready": True, "waiting": {}})
    for body, path in ((BODY, "completions"), (LONG, "completions"), (CHAT, "chat/completions")):
        for fields in ({}, {"n": 2}, {"max_tokens": 1}):
            assert (await stage.ask({**body, **fields}, path))[0] == 200
            assert (await stage.stream({**body, **fields}, path)).error is None
    assert set(legs(decode)) == {"alone"}
    assert stage.metric(DECODE_ONLY) == len(decode.asked) == 18


async def test_pairs_serve_again_as_soon_as_they_can(stage: Stage) -> None:
    decode = await stage.agent("decode")
    await stage.ask(BODY)
    prefill = await stage.agent("prefill")
    await stage.ask(BODY)
    assert (legs(prefill), legs(decode)) == (["prefill"], ["alone", "decode"])
    assert stage.metric(DECODE_ONLY) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", ["killed", "unreachable"])
async def test_the_last_prefill_agent_is_lost_with_a_request(stage: Stage, stream: bool, end: str) -> None:
    """The answer is the one that it would have been; nobody waits for a host that is down."""
    prefill, decode = await stage.pair()
    expected = (await stage.stream(BODY)).text() if stream else (await stage.ask(BODY))[1]["choices"]
    decode.asked.clear()
    prefill.faults.append(Fault("prefill", "hang"))
    asking = asyncio.ensure_future(stage.stream(BODY) if stream else stage.ask(BODY))
    await prefill.until(lambda: not prefill.faults)
    await prefill.silence()
    if end == "killed":
        await prefill.close_http()
    async with asyncio.timeout(10):
        answer: Any = await asking
    text = answer.text() if stream else answer[1]["choices"]
    assert text == expected
    assert legs(decode) == ["alone"]
    assert stage.metric(DECODE_ONLY) == 1


@pytest.mark.parametrize("comes", [True, False])
async def test_while_agents_announce_themselves_a_prefill_agent_is_waited_for(comes: bool) -> None:
    """As after the start of a proxy: it is most likely about to come."""
    clock = asyncio.get_running_loop().time
    fleet = Fleet(FleetSettings(), Metrics(), clock, settled_at=clock() + 0.5)
    fleet.registry.register(registration("decode", 1))
    request = AcquireRequest(routing_request=RoutingRequest(model="m"), by=clock() + 5.0)
    waiting = asyncio.ensure_future(fleet.acquire(request))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    if comes:
        fleet.registry.register(registration("prefill", 2))
    granted = await waiting
    assert isinstance(granted, Reservation) and granted.pair.alone is not comes


async def test_the_option_turns_it_off(start_stage: StartStage) -> None:
    stage = await start_stage(decode_only_fallback=False)
    decode = await stage.agent("decode")
    status, report = await ready(stage)
    assert status == 503 and "no prefill agent" in report["waiting"]["stand-in"]
    assert (await stage.ask(BODY))[0] == 503
    assert not decode.asked and stage.metric(DECODE_ONLY) == 0


async def test_where_short_prompts_are_served_alone_the_proxy_is_ready(start_stage: StartStage) -> None:
    stage = await start_stage(decode_only_fallback=False, split_min_tokens=50)
    await stage.agent("decode")
    assert (await ready(stage))[0] == 200
    assert (await stage.ask(BODY))[0] == 200
    assert (await stage.ask(LONG))[0] == 503
    assert stage.metric(DECODE_ONLY) == 0
