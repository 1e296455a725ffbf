# SPDX-License-Identifier: Apache-2.0
"""What the number of agents costs the proxy: CPU time per request, per ping and per page, in this process,
and how long a page keeps requests from being served. Then, with real sockets and processes, what a whole
request costs the proxy and another router in front of few and of many stand-in engines.

python -m benchmarks.fleet_cost [--agents 2,32,128,512,1000] [--policy round_robin] [--both]
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import get_args

import msgspec
import psutil

from benchmarks.proxy_cost import PAIR, missing_rivals, request_cost, router
from kvferry.proxy.api.operator.commands import OperatorApi, PageName
from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet, FleetSettings
from kvferry.proxy.fleet.routing.policy import PolicyName
from kvferry.proxy.fleet.routing.routing_request import RoutingRequest
from kvferry.proxy.telemetry.agent_reports import AgentReports
from kvferry.proxy.telemetry.collectors import FleetCollector
from kvferry.proxy.telemetry.history import FailureLog, History
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Timelines
from kvferry.proxy.wire.registration import Capacity, Incarnation, Load, Register

SIZES = (2, 32, 128, 512, 1000)
LEAST_S = 0.3
PAGES: tuple[PageName, ...] = ("nodes", "ready", "metrics", "dashboard")
ROUTERS = {
    "vllm-router": "vllm-router",
    "kvferry, one agent": "kvferry",
    "vllm-router" + PAIR: "vllm-router, pairs",
    "kvferry native" + PAIR: "kvferry, pairs",
}
"""By their names in `proxy_cost`, how they are shown. Of pairs, half of the engines have each role."""
ROUTED = (2, 128)
"""Engines behind each of them."""
REQUESTS = 3200
MEASURED = Capacity(
    prompts=100, prefill_s=5.0, decode_s=20.0, answers=100, answer_tokens=20_000, slots=256, step_s=0.007,
    sequence_s=0.0001, token_s=0.000027, backlog_s=0.0,
)  # fmt: skip
"""What every agent has measured, so that the costs of requests are compared."""
TICK_S = 1e-5
MISFITS = 4
"""Layouts in the fleet where nothing fits; each prefill agent has one, and no decode agent has it."""


def agent(number: int, running: int = 0, *, fits: bool = True) -> Register:
    """Return a ping of the agent; even numbers prefill, odd ones decode."""
    host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return Register(
        role="decode" if number % 2 else "prefill",
        incarnation=Incarnation(f"{number:016x}"),
        index=1,
        address=f"http://{host}:8000",
        control=f"tcp://{host}:9000",
        dialect="native",
        model="m",
        max_model_len=4096,
        tp_size=1,
        dp_size=1,
        transfers=("cuda_ipc", "tcp"),
        host_id=f"host {number // 8}",
        layout="l" if fits else f"{number % 2} {number // 2 % MISFITS}",
        weights="w",
        tokenizer="t",
        transfer_mode="read",
        version="0",
        state="ready",
        steps=0,
        load=Load(running, 0, 1000, 1000, 0, max_running=256),
        capacity=MEASURED,
    )


def cpu_ms(action: Callable[[], object]) -> float:
    """Return the CPU milliseconds of one call, as the mean of as many as fit `LEAST_S`."""
    action()
    count, begun = 0, time.process_time()
    while (spent := time.process_time() - begun) < LEAST_S or not count:
        action()
        count += 1
    return 1000 * spent / count


@dataclass(slots=True)
class Holds:
    """The most CPU time, in milliseconds, that the event loop spent without a turn for others."""

    longest_ms: float = 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[Holds]:
    """Watch the event loop while the context is open. CPU time: what else runs here does not count."""
    holds = Holds()

    async def tick() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            holds.longest_ms = max(holds.longest_ms, 1000 * (now - last))
            last = now

    ticking = asyncio.ensure_future(tick())
    try:
        await asyncio.sleep(0)
        yield holds
    finally:
        ticking.cancel()


async def page_ms(make: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return the CPU milliseconds of one page, and the longest hold of the event loop meanwhile."""
    await make()
    count, begun = 0, time.process_time()
    while (spent := time.process_time() - begun) < LEAST_S or not count:
        await make()
        count += 1
    async with watched() as holds:
        for _ in range(5):
            await make()
            await asyncio.sleep(0)
    return 1000 * spent / count, holds.longest_ms


class Bench:
    """A fleet without sockets."""

    def __init__(self, agents: int, policy: PolicyName, *, both: bool = False) -> None:
        self._now = 0.0
        self.clock = lambda: self._now  # on a busy machine no ping may expire meanwhile
        metrics = Metrics()
        settings = FleetSettings(prefill_policy=policy, decode_policy=policy)
        self.fleet = Fleet(settings, metrics, self.clock)
        reports = AgentReports(self.clock)
        self.fleet.registry.subscribe(reports.note)
        self.views = OperatorApi(
            self.fleet,
            metrics,
            History(),
            FailureLog(),
            Timelines(),
            reports,
            down=list,
        )
        metrics.add_collector(FleetCollector(self.fleet.registry.snapshot, self.fleet.registry.lost, list))
        self._pings = [agent(number) for number in range(agents)]
        if both:
            self._pings = [msgspec.structs.replace(ping, role="both") for ping in self._pings]
        self._turn = 0

    def register_all(self, **fields: object) -> None:
        """Have every agent ping, with these fields from now on."""
        self._turn += 1
        self._pings = [msgspec.structs.replace(ping, index=self._turn, **fields) for ping in self._pings]
        for ping in self._pings:
            self.fleet.registry.register(ping)

    def misfit(self) -> None:
        """Have every agent ping with a layout that fits no other's."""
        self._pings = [agent(number, fits=False) for number in range(len(self._pings))]
        self.register_all()

    def ping(self) -> None:
        """Have the next agent ping."""
        self._turn += 1
        ping = self._pings[self._turn % len(self._pings)]
        self.fleet.registry.register(msgspec.structs.replace(ping, index=self._turn))

    def acquire(self) -> AcquireRequest:
        routing = RoutingRequest(model="m", prompt="a prompt " * 100, session=f"{self._turn % 100}")
        return AcquireRequest(routing_request=routing, by=asyncio.get_running_loop().time() + 60)

    def request(self) -> None:
        """Route a request and release its slots."""
        self._now += TICK_S
        waiting = self.fleet.acquire(self.acquire())
        try:
            waiting.send(None)
        except StopIteration as done:
            done.value.release()

    def request_after_ping(self) -> None:
        self.ping()
        self.request()

    async def page(self, name: PageName) -> None:
        """Make a page anew."""
        await self.views._make(name)


async def measure(agents: int, policy: PolicyName, *, both: bool) -> list[str]:
    """Return a row of the table."""
    bench = Bench(agents, policy, both=both)
    bench.register_all()
    figures = [cpu_ms(bench.request)]
    bench.register_all()
    figures.append(cpu_ms(bench.request_after_ping))
    pages = []
    for name in PAGES:
        bench.register_all()
        pages.append(await page_ms(lambda name=name: bench.page(name)))  # type: ignore[misc]
    bench.misfit()
    pages.append(await page_ms(lambda: bench.page("nodes")))
    bench = Bench(agents, policy, both=both)
    bench.register_all(load=Load(256, 0, 1000, 1000, 0, max_running=256))
    waiter = asyncio.create_task(bench.fleet.acquire(bench.acquire()))
    await asyncio.sleep(0)
    assert bench.fleet.admission.waiting
    figures.append(cpu_ms(bench.ping))
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    return [*(f"{each:.3f}" for each in figures), *(f"{cpu:.2f} ({hold:.1f})" for cpu, hold in pages)]


async def routers_table() -> list[str]:
    """Return the lines of the table of routers; those that are not installed are named in one."""
    missing = missing_rivals()
    lines = [f"{name} is not installed (make bench-fleet tries to): left out" for name in missing]
    lines += ["", f"| CPU ms per request | {' | '.join(f'{count} engines' for count in ROUTED)} | ratio |"]
    lines.append("|---" * (len(ROUTED) + 2) + "|")
    for name, shown in ROUTERS.items():
        if name.removesuffix(PAIR) in missing:
            continue
        costs = []
        for count in ROUTED:
            async with router(name, count // 2 if name.endswith(PAIR) else count) as at:
                costs.append((await request_cost(name, at, REQUESTS)).cpu_ms_per_request)
        figures = " | ".join(f"{cost:.3f}" for cost in costs)
        lines.append(f"| {shown} | {figures} | {costs[-1] / costs[0]:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", default=",".join(map(str, SIZES)))
    parser.add_argument("--policy", choices=get_args(PolicyName), default="least_work")
    parser.add_argument("--both", action="store_true", help="every agent has the role both")
    options = parser.parse_args()
    sizes = [int(size) for size in options.agents.split(",")]
    machine = f"{psutil.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%F')}"
    print(f"{options.policy}{', role both' if options.both else ''}; {machine}")
    pages = [f"{page} (hold)" for page in ("/nodes", "/ready", "/metrics", "/ui", "/nodes, nothing fits")]
    columns = ["agents", "request", "request after a ping", "ping while one waits", *pages]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for size in sizes:
        try:
            row = asyncio.run(measure(size, options.policy, both=options.both))
        except Overloaded as error:
            raise SystemExit(str(error)) from error
        print(f"| {size} | {' | '.join(row)} |", flush=True)
    print("\n".join(asyncio.run(routers_table())))


if __name__ == "__main__":
    main()
