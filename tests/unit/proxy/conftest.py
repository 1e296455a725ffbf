# SPDX-License-Identifier: Apache-2.0
"""A proxy with stand-in agents, over real sockets, that must be left with nothing in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import pytest
import pytest_asyncio
import uvicorn.server
from prometheus_client import Counter
from werkzeug.routing import Rule

from kvferry.common.http import server
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.exchange.exchange import RESERVE
from kvferry.proxy.server import RunningProxy, running_proxy
from kvferry.proxy.telemetry.metrics import LabelledCounter
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

    proxy: RunningProxy = field(repr=False)
    http: aiohttp.ClientSession = field(repr=False)
    agents: list[StandInAgent] = field(repr=False)
    _stack: AsyncExitStack = field(repr=False)

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


class QuickExits:
    """`asyncio`, for uvicorn: it looks every 0.1 s whether it is to exit, and here at once when told.

    It also waits 0.1 s for what was closed, which takes two turns of the loop.
    """

    def __init__(self) -> None:
        self._asleep: set[asyncio.Future[None]] = set()
        self._stopping: set[asyncio.Task[Any] | None] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.get_running_loop().create_future()
        self._asleep.add(awake)
        await asyncio.wait([awake], timeout=TICK_S if asyncio.current_task() in self._stopping else seconds)
        self._asleep.discard(awake)

    def should_exit(self) -> property:
        """What a server's attribute of this name becomes."""

        def tell(server: uvicorn.Server, told: bool) -> None:
            server.__dict__["should_exit"] = told
            for awake in self._asleep if told else ():
                if not awake.done():
                    awake.set_result(None)

        return property(lambda server: server.__dict__["should_exit"], tell)

    def shutdown(self) -> Callable[..., Awaitable[None]]:
        """What a server's method of this name becomes."""
        shutdown = uvicorn.Server.shutdown

        async def stop(server: uvicorn.Server, sockets: Any = None) -> None:
            self._stopping.add(task := asyncio.current_task())
            await shutdown(server, sockets)
            self._stopping.discard(task)

        return stop


def url_of_route(*_: Any, **__: Any) -> str:
    raise AssertionError("nobody needs it")


@pytest.fixture(scope="module")
def quick_proxies() -> Iterator[None]:
    """Proxies that start and stop at once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(uvicorn.server, "asyncio", exits := QuickExits())
        monkeypatch.setattr(uvicorn.Server, "should_exit", exits.should_exit(), raising=False)
        monkeypatch.setattr(uvicorn.Server, "shutdown", exits.shutdown())
        monkeypatch.setattr(server, "HANDSHAKE_S", TICK_S)
        # Three quarters of a proxy's start, and only `url_for` needs it: the proxy makes no URL of a route.
        monkeypatch.setattr(Rule, "_compile_builder", lambda rule, append_unknown=True: url_of_route)
        yield


@pytest.fixture
async def start_stage(quick_proxies: None) -> AsyncIterator[StartStage]:
    """`start_stage(**settings)`: a proxy with short deadlines and no agents yet."""
    async with AsyncExitStack() as stack:
        stages = []

        async def start(**settings: Any) -> Stage:
            config = ProxyConfig(port=0, discovery_port=0, **(FAST | settings))
            proxy = await stack.enter_async_context(running_proxy(config))
            stage = await stack.enter_async_context(on_stage(proxy))
            stages.append(stage)
            return stage

        yield start
        for stage in stages:
            await stage.assert_quiescent()


@asynccontextmanager
async def on_stage(proxy: RunningProxy) -> AsyncIterator[Stage]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
        AsyncExitStack() as agents,
    ):
        yield Stage(proxy, http, [], agents)


@pytest.fixture
async def stage(start_stage: StartStage) -> Stage:
    return await start_stage()


class SharedProxies:
    """Proxies that the tests of a module use one after the other: starting one takes longer than most tests.

    No agent of a test before is known to it any more, and its counters are zero. Its other metrics and its
    logs go on.
    """

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._proxies: dict[str, list[RunningProxy]] = {}

    @asynccontextmanager
    async def stage(self, **settings: Any) -> AsyncIterator[Stage]:
        """A proxy with these settings, that is left with nothing in flight and no agents."""
        config = ProxyConfig(port=0, discovery_port=0, **(FAST | settings))
        unused = self._proxies.setdefault(repr(config), [])
        proxy = unused.pop() if unused else await self._stack.enter_async_context(running_proxy(config))
        async with on_stage(proxy) as stage:
            yield stage
            await stage.assert_quiescent()
        for node in proxy.fleet.registry.snapshot().nodes:
            proxy.fleet.registry.bye(node.incarnation)
        proxy.services.exchanges.retry_budget._tokens = RESERVE
        for metric in proxy.services.metrics.registry._collector_to_names:
            if isinstance(metric, LabelledCounter):
                for value, count in metric.counts().items():
                    metric.add(value, -count)
            elif isinstance(metric, Counter):
                for counter in metric._metrics.values() if metric._labelnames else (metric,):
                    counter.reset()
        unused.append(proxy)  # not if the test has failed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_proxies(quick_proxies: None) -> AsyncIterator[SharedProxies]:
    async with AsyncExitStack() as stack:
        yield SharedProxies(stack)


@pytest.fixture
async def borrow_stage(shared_proxies: SharedProxies) -> AsyncIterator[StartStage]:
    """As `start_stage`, of proxies that other tests of the module have used."""
    async with AsyncExitStack() as stack:

        async def borrow(**settings: Any) -> Stage:
            return await stack.enter_async_context(shared_proxies.stage(**settings))

        yield borrow
