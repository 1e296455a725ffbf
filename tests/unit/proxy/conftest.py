# SPDX-License-Identifier: Apache-2.0
"""A proxy with stand-in agents, over real sockets, that must be left with nothing in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import pytest
import uvicorn.server
from werkzeug.routing import Rule

from kvferry.common.http import server
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.server import RunningProxy, running_proxy
from kvferry.proxy.wire.registration import Role
from tests.standins.agents import StandInAgent
from tests.unit.proxy.exposition import parse_sample

A = TypeVar("A", bound=StandInAgent)
C = TypeVar("C")

TICK_S = 0.002
FAST = {
    "connect_timeout_s": 2.0,
    "first_byte_timeout_s": 10.0,
    "idle_timeout_s": 10.0,
    "total_timeout_s": 20.0,
    "drain_s": 1.0,
}


async def side_by_side(run: Callable[[C], Awaitable[None]], cases: Iterable[C]) -> None:
    """Run cases at the same time whose time is mostly waiting; whatever fails is shown with its case."""

    async def one(case: C) -> None:
        try:
            await run(case)
        except Exception as failed:
            failed.add_note(f"case: {case!r}")
            raise

    async with asyncio.TaskGroup() as tasks:
        for case in cases:
            tasks.create_task(one(case))


@dataclass(slots=True)
class Streamed:
    """One streamed answer, read to its end."""

    status: int
    headers: Any
    raw: bytes
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.raw.endswith(b"\n\n"), "a stream ends with a whole event"
        *events, last = self.raw.removesuffix(b"\n\n").split(b"\n\n")
        assert last == b"data: [DONE]"
        self.events = [json.loads(event.removeprefix(b"data: ")) for event in events]

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    def text(self, index: int = 0) -> str:
        shown = ""
        for event in self.events:
            for choice in event.get("choices", []):
                if choice["index"] == index:
                    shown += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        return shown


@dataclass(slots=True)
class Stage:
    """One proxy, and the agents that a test brings on."""

    proxy: RunningProxy
    http: aiohttp.ClientSession
    agents: list[StandInAgent]
    _stack: AsyncExitStack

    @property
    def discovery(self) -> str:
        return f"127.0.0.1:{self.proxy.discovery_port}"

    async def agent(self, role: Role, **kwargs: Any) -> StandInAgent:
        """Start an agent and wait until the proxy has acked it."""
        return await self.bring(StandInAgent(role, (self.discovery,), **kwargs))

    async def bring(self, agent: A) -> A:
        """Start it, and wait until the proxy has acked it."""
        await self._stack.enter_async_context(agent)
        await agent.until(lambda: agent.acks)
        self.agents.append(agent)
        return agent

    async def pair(self, **kwargs: Any) -> tuple[StandInAgent, StandInAgent]:
        return await self.agent("prefill", **kwargs), await self.agent("decode", **kwargs)

    def post(self, body: Any, path: str = "completions", **kwargs: Any) -> Any:
        payload = {"json": body} if isinstance(body, dict) else {"data": body}
        return self.http.post(f"{self.proxy.url}/v1/{path}", **payload, **kwargs)

    async def ask(self, body: Any, path: str = "completions") -> tuple[int, dict[str, Any]]:
        async with self.post(body, path) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def stream(self, body: dict[str, Any], path: str = "completions") -> Streamed:
        async with self.post({**body, "stream": True}, path) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return Streamed(response.status, response.headers, await response.read())

    def metric(self, line: str) -> float:
        """The value of one sample, named as in the exposition."""
        name, labels = parse_sample(line)
        return sum(
            sample.value
            for family in self.proxy.services.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def assert_quiescent(self) -> None:
        """Nothing is left of any request: no slot, no phase, no drop, no lease, no handler."""
        services = self.proxy.services
        await services.drops.settle()
        for agent in self.agents:
            await agent.until(lambda agent=agent: not agent.running)
            assert not agent.leases, f"{agent.role} still holds {agent.leases}"
        fleet = self.proxy.fleet
        assert fleet.slots.idle and not fleet.admission.waiting
        fleet.admission.check_integrity()
        in_flight = self.proxy.services.metrics.in_flight.counts()
        assert not any(in_flight.values()), in_flight
        fleet.registry.check_integrity()


StartStage = Callable[..., Awaitable[Stage]]


class QuickSleeps:
    """`asyncio`, for uvicorn: it looks every 0.1 s whether it is to stop, and the tests stop 600 proxies."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, TICK_S))


def url_of_route(*_: Any, **__: Any) -> str:
    raise AssertionError("nobody needs it")


@pytest.fixture
async def start_stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartStage]:
    """`start_stage(**settings)`: a proxy with short deadlines and no agents yet."""
    monkeypatch.setattr(uvicorn.server, "asyncio", QuickSleeps())
    monkeypatch.setattr(server, "HANDSHAKE_S", TICK_S)
    # Three quarters of a proxy's start, and only `url_for` needs it: the proxy makes no URL of a route.
    monkeypatch.setattr(Rule, "_compile_builder", lambda rule, append_unknown=True: url_of_route)
    async with AsyncExitStack() as stack:
        stages = []

        async def start(**settings: Any) -> Stage:
            config = ProxyConfig(port=0, discovery_port=0, **(FAST | settings))
            proxy = await stack.enter_async_context(running_proxy(config))
            http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
            )
            agents = await stack.enter_async_context(AsyncExitStack())
            stage = Stage(proxy, http, [], agents)
            stages.append(stage)
            return stage

        yield start
        for stage in stages:
            await stage.assert_quiescent()


@pytest.fixture
async def stage(start_stage: StartStage) -> Stage:
    return await start_stage()
