# SPDX-License-Identifier: Apache-2.0
"""Requests through pairs of other engines' servers: what the client sees, what the servers were told, and that
nothing is left, however it ends. A server that was told anything wrong notes it in `Fabric.wrongs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.standins.agents import Fault
from tests.standins.engines import CACHED_AT_PREFILL, SERVERS, STOPS_AT_ONCE, Fabric, StandInServer
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 4, "seed": 7}
CHAT = {"model": "stand-in", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 7}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "atom": ("atom", {}),
    "sglang": ("sglang", {}),
    "vllm-mooncake": ("vllm-mooncake", {}),
    "vllm-moriio-read": ("vllm-moriio", {}),
    "vllm-moriio-write": ("vllm-moriio", {"writes": True}),
    "vllm-nixl-pull": ("vllm-nixl", {}),
    "vllm-nixl-push": ("vllm-nixl", {"pushes": True}),
}


@dataclass(slots=True)
class Fleet:
    """A proxy with a pair of one engine's servers, and where their wrongs are noted."""

    stage: Stage
    fabric: Fabric
    kind: str

    async def server(self, role: Any, **settings: Any) -> StandInServer:
        dialect, fixed = KINDS[self.kind]
        made = SERVERS[dialect](
            role=role, proxies=(self.stage.discovery,), fabric=self.fabric, **(fixed | settings)
        )
        return await self.stage.bring(made)

    async def pair(self, **settings: Any) -> tuple[StandInServer, StandInServer]:
        return await self.server("prefill", **settings), await self.server("decode", **settings)


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, stage: Stage) -> AsyncIterator[Fleet]:
    fleet = Fleet(stage, Fabric(), request.param)
    yield fleet
    assert not fleet.fabric.wrongs


every_kind = pytest.mark.parametrize("fleet", KINDS, indirect=True)


def only(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fleet", kinds, indirect=True)


async def reference(body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    """What one server alone answers."""
    import aiohttp

    class _Alone(StandInServer):
        dialect = "vllm-nixl"

    async with _Alone(role="both", fabric=Fabric()) as server, aiohttp.ClientSession() as http:
        async with http.post(
            f"{server.address}/v1/{path}", json=body, headers={"X-Request-Id": "reference"}
        ) as response:
            return await response.json()


@every_kind
@pytest.mark.parametrize("extra", [{}, {"n": 3}], ids=str)
@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
async def test_a_pair_answers_as_one_server_alone_does(
    fleet: Fleet, path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    """A1, rows 7 and 9 of vllm-sglang §5: n singles, prompt counted once, cached tokens those of the prefill."""
    await fleet.pair()
    asked = body | extra
    expected = await reference(asked, path)
    status, answer = await fleet.stage.ask(asked, path)
    assert status == 200, answer
    assert answer["choices"] == expected["choices"]
    streamed = await fleet.stage.stream({**asked, "stream_options": {"include_usage": True}}, path)
    assert streamed.error is None
    for choice in expected["choices"]:
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert streamed.text(choice["index"]) == text
    for usage in (answer["usage"], streamed.events[-1]["usage"]):
        counted = {name: count for name, count in expected["usage"].items() if name != "prompt_tokens_details"}
        assert {name: usage[name] for name in counted} == counted
