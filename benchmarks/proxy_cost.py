# SPDX-License-Identifier: Apache-2.0
"""What the proxy costs: CPU time of its process tree per SSE event and per request, and the time it adds.

Run it by `make bench-proxy`; what is measured, and how, is in `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import aiohttp
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from tests.helpers.servers import free_port

EVENT_INTERVAL_S = 0.02
STREAMS = (64, 256)
WINDOW_S = 4.0
LENGTHS = (64, 512)
LENGTH_STREAMS = 256
LENGTH_EVENTS = 512
"""Per place: so many events one after the other, as one stream or as several."""
PROBES = 200
WHOLE_REQUESTS = 6400
WHOLE_CONCURRENCY = 16
START_TIMEOUT_S = 30.0
DIRECT, PLAIN = "no router", "plain relay"
RIVAL_FOLDER = Path("build/rivals")
"""Where `make bench-proxy` installs them, each in an environment of its own."""
RIVALS = {
    "vllm-router": (str(RIVAL_FOLDER / "vllm-router/bin/vllm-router"),),
    "sglang-router": (str(RIVAL_FOLDER / "sglang-router/bin/python"), "-m", "sglang_router.launch_router"),
}
PAIR = ", a pair"
"""What the name of a router ends with that has a prefill and a decode server."""
PAIR_FLAGS = {
    "vllm-router": ("--vllm-pd-disaggregation", "--kv-connector", "nixl"),
    "sglang-router": ("--pd-disaggregation",),
}
BOOTSTRAP_PORT = "8998"
"""Of the prefill server, as SGLang's protocol names it to the decode server; nobody listens there."""
KINDS = ("streams", "lengths", "requests")
ANNOUNCED = ("native", "vllm-kvferry")
"""Dialects whose servers announce themselves; the others' are named to the proxy."""
SINGLE = (DIRECT, PLAIN, *RIVALS, "kvferry, one agent")
PAIRS = (
    *(name + PAIR for name in RIVALS),
    *(f"kvferry {dialect}{PAIR}" for dialect in ("native", "vllm-nixl", "vllm-kvferry", "sglang")),
)
BODY = {"model": "stand-in", "prompt": "a prompt of some words", "seed": 1, "temperature": 0}
"""Greedy: so that streams of `vllm-kvferry` begin early, and their tokens are noted."""


@dataclass(frozen=True, slots=True)
class Child:
    """One started process, and where it listens."""

    pid: int
    listening: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamCost:
    """One router under one number of streams."""

    router: str
    streams: int
    events_per_s: float
    cpu_us_per_event: float
    ttfb_p50_ms: float
    ttfb_p99_ms: float


@dataclass(frozen=True, slots=True)
class LengthCost:
    """One router serving streams of a length, all they cost included, divided by their events."""

    router: str
    events_per_stream: int
    events_per_s: float
    cpu_us_per_event: float


@dataclass(frozen=True, slots=True)
class RequestCost:
    """One router answering requests that do not stream."""

    router: str
    cpu_ms_per_request: float


C = TypeVar("C", StreamCost, LengthCost, RequestCost)
K = TypeVar("K")


class StreamClient(asyncio.Protocol):
    """One streamed request over a bare socket: counts events at far less cost than the router under test."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None
        self.events = 0
        self.is_open = False
        self.ttfb = asyncio.get_running_loop().create_future()
        self.done = asyncio.get_running_loop().create_future()
        """Set when `[DONE]` has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"\n\n")
        if not self.ttfb.done() and b"data: " in data:
            self.ttfb.set_result(time.perf_counter() - self._sent_at)
        if b"[DONE]" in data and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if not self.ttfb.done():
            self.ttfb.set_exception(ConnectionError("the stream ended before its first event"))
        self.done.cancel()

    def leave(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


@asynccontextmanager
async def child(*argv: str) -> AsyncIterator[Child]:
    """`python -m argv…` for as long as the context is open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
        yield Child(process.pid, json.loads(line)["listening"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def router(name: str, count: int = 1) -> AsyncIterator[Child]:
    """One router with the stand-in engines that it needs, so many of each role, ready to serve."""
    engine = ("benchmarks.engine", "--interval-s", str(EVENT_INTERVAL_S), "--count", str(count))
    roles = ("prefill", "decode") if name.endswith(PAIR) else ("both",)
    async with AsyncExitStack() as stack:

        async def engines(*options: str) -> list[list[str]]:
            """The URLs of each role."""
            started = [
                await stack.enter_async_context(child(*engine, "--role", role, *options)) for role in roles
            ]
            return [each.listening["urls"] for each in started]

        if name == DIRECT:
            yield await stack.enter_async_context(child(*engine))
        elif name == PLAIN:
            yield await stack.enter_async_context(child("benchmarks.plain_relay", *(await engines())[0]))
        elif name.startswith("kvferry"):
            named: tuple[str, ...] = ()
            dialect = name.removesuffix(PAIR).partition(" ")[2] if name.endswith(PAIR) else "native"
            if dialect not in ANNOUNCED:
                prefills, decodes = await engines()
                prefills = [_at_bootstrap(dialect, prefill) for prefill in prefills]
                named = ("--dialect", dialect, "--prefill", *prefills, "--decode", *decodes)
            proxy = await stack.enter_async_context(
                child("proxy", "--port", "0", "--discovery-port", "0", "--log-level", "warning", *named)
            )
            if not named:
                where = f"127.0.0.1:{proxy.listening['discovery_port']}"
                await engines("--proxy", where, "--dialect", dialect)
            await _until_served(proxy.listening["url"])
            await _until_known(proxy.listening["url"], count * len(roles))
            yield proxy
        else:
            yield await stack.enter_async_context(rival(name, await engines()))


def _at_bootstrap(dialect: str, prefill: str) -> str:
    return f"{prefill},bootstrap_port={BOOTSTRAP_PORT}" if dialect == "sglang" else prefill


@asynccontextmanager
async def rival(name: str, engines: Sequence[Sequence[str]]) -> AsyncIterator[Child]:
    """A router from the package index in front of engines of one or two roles, for as long as it is open."""
    product = name.removesuffix(PAIR)
    workers: tuple[str, ...] = ("--worker-urls", *engines[0])
    if name.endswith(PAIR):
        prefills, decodes = engines
        bootstrap = (BOOTSTRAP_PORT,) if product == "sglang-router" else ()
        named = [word for prefill in prefills for word in ("--prefill", prefill, *bootstrap)]
        workers = (*PAIR_FLAGS[product], *named, *(word for url in decodes for word in ("--decode", url)))
    ports = [free_port(), free_port()]
    process = await asyncio.create_subprocess_exec(
        *RIVALS[product], "--host", "127.0.0.1", "--port", str(ports[0]), *workers,
        "--policy", "round_robin", "--prometheus-port", str(ports[1]), "--log-level", "error",
        "--worker-startup-check-interval", "1",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{ports[0]}"
        await _until_served(url)
        yield Child(process.pid, {"url": url})
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_served(url: str) -> None:
    """Wait until a completion is answered."""
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 2}) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def _until_known(url: str, count: int) -> None:
    """Wait until a proxy knows so many agents."""
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/nodes") as response:
                nodes = (await response.json())["nodes"]
            if sum(node["state"] == "ready" for node in nodes) >= count:
                return
            await asyncio.sleep(0.1)


async def stream_cost(name: str, at: Child, streams: int) -> StreamCost:
    """CPU per event over a window of steady streaming, then the TTFB of further streams beside them."""
    clients = [await open_stream(at) for _ in range(streams)]
    async with asyncio.timeout(START_TIMEOUT_S):
        await asyncio.gather(*(client.ttfb for client in clients))
    before, events, start = cpu_s(at.pid), _events(clients), time.perf_counter()
    await asyncio.sleep(WINDOW_S)
    spent, events, elapsed = cpu_s(at.pid) - before, _events(clients) - events, time.perf_counter() - start
    ttfbs = []
    for _ in range(PROBES):
        probe = await open_stream(at)
        ttfbs.append(await probe.ttfb * 1e3)
        probe.leave()
    for client in clients:
        client.leave()
    return StreamCost(
        router=name,
        streams=streams,
        events_per_s=events / elapsed,
        cpu_us_per_event=spent / events * 1e6,
        ttfb_p50_ms=statistics.median(ttfbs),
        ttfb_p99_ms=statistics.quantiles(ttfbs, n=100)[98],
    )


async def length_cost(name: str, at: Child, length: int) -> LengthCost:
    """CPU per event of streams of so many events: 256 places, in each one stream after the other."""
    events = 0

    async def serve_place() -> None:
        nonlocal events
        for _ in range(LENGTH_EVENTS // length):
            client = await open_stream(at, max_tokens=length)
            async with asyncio.timeout(START_TIMEOUT_S + length * EVENT_INTERVAL_S * 4):
                await asyncio.wait([client.done])
            events += client.events - 1  # [DONE]
            client.leave()

    before, start = cpu_s(at.pid), time.perf_counter()
    await asyncio.gather(*(serve_place() for _ in range(LENGTH_STREAMS)))
    spent, elapsed = cpu_s(at.pid) - before, time.perf_counter() - start
    assert events == LENGTH_STREAMS * LENGTH_EVENTS, f"{name} gave {events} events"
    return LengthCost(name, length, events / elapsed, spent / events * 1e6)


async def request_cost(name: str, at: Child, requests: int = WHOLE_REQUESTS) -> RequestCost:
    """CPU per request that does not stream, over kept connections."""
    connector = aiohttp.TCPConnector(limit=WHOLE_CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def ask(times: int) -> None:
            for _ in range(times):
                body = {**BODY, "max_tokens": 2}
                async with http.post(f"{at.listening['url']}/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()

        share = requests // WHOLE_CONCURRENCY
        await asyncio.gather(*(ask(2) for _ in range(WHOLE_CONCURRENCY)))  # open the connections
        before = cpu_s(at.pid)
        await asyncio.gather(*(ask(share) for _ in range(WHOLE_CONCURRENCY)))
        spent = cpu_s(at.pid) - before
    return RequestCost(name, spent / (share * WHOLE_CONCURRENCY) * 1e3)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its descendants, to the nanosecond: /proc counts ticks of 10 ms."""
    root = psutil.Process(pid)
    family = (process.pid for process in (root, *root.children(recursive=True)))
    # A process's CPU clock, as clock_getcpuclockid(3) makes it: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
    return sum(time.clock_gettime((~each << 3) | 2) for each in family)


async def open_stream(at: Child, max_tokens: int = 4000) -> StreamClient:
    """A stream; by default it goes on until somebody leaves."""
    url = urlsplit(at.listening["url"])
    body = json.dumps({**BODY, "max_tokens": max_tokens, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(
        lambda: StreamClient(head.encode() + body), url.hostname, url.port
    )
    return client


def _events(clients: Sequence[StreamClient]) -> int:
    return sum(client.events for client in clients)


@dataclass(slots=True)
class Figures:
    """What was measured, one entry per router and round."""

    streams: list[StreamCost] = field(default_factory=list)
    lengths: list[LengthCost] = field(default_factory=list)
    requests: list[RequestCost] = field(default_factory=list)


def show(figures: Figures, console: Console) -> None:
    """Print the tables: medians over the rounds."""
    table = Table(title=f"an event every {EVENT_INTERVAL_S * 1e3:.0f} ms per stream")
    for column in ("router", "streams", "events/s", "CPU µs/event", "ratio", "TTFB p50 ms", "p99 ms"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for (name, streams), costs in _by(figures.streams, lambda cost: (cost.router, cost.streams)):
        peers = [cost for cost in figures.streams if cost.streams == streams]
        table.add_row(
            name,
            str(streams),
            f"{_median(cost.events_per_s for cost in costs):,.0f}",
            *_cost(name, costs, peers, lambda cost: cost.cpu_us_per_event, ".1f"),
            f"{_median(cost.ttfb_p50_ms for cost in costs):.2f}",
            f"{_median(cost.ttfb_p99_ms for cost in costs):.2f}",
        )
    console.print(table)
    table = Table(title=f"{LENGTH_STREAMS} streams at once, each to its end, the next at once")
    for column in ("router", "events each", "events/s", "CPU µs/event", "ratio"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for (name, length), ended in _by(figures.lengths, lambda cost: (cost.router, cost.events_per_stream)):
        alike = [cost for cost in figures.lengths if cost.events_per_stream == length]
        table.add_row(
            name,
            str(length),
            f"{_median(cost.events_per_s for cost in ended):,.0f}",
            *_cost(name, ended, alike, lambda cost: cost.cpu_us_per_event, ".1f"),
        )
    console.print(table)
    table = Table(title="requests that do not stream")
    for column in ("router", "CPU ms/request", "ratio"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for name, asked in _by(figures.requests, lambda cost: cost.router):
        table.add_row(
            name, *_cost(name, asked, figures.requests, lambda cost: cost.cpu_ms_per_request, ".3f")
        )
    console.print(table)


def _by(costs: Sequence[C], key: Callable[[C], K]) -> list[tuple[K, list[C]]]:
    """Group costs by a key, in the order in which they were measured."""
    groups: dict[K, list[C]] = {}
    for cost in costs:
        groups.setdefault(key(cost), []).append(cost)
    return list(groups.items())


def _cost(
    name: str, costs: Sequence[C], peers: Sequence[C], figure: Callable[[C], float], form: str
) -> tuple[str, str]:
    """The median figure of a router, and its ratio to the cheapest rival that has as many servers.

    Without any rival it is the ratio to the plain relay; empty where there is neither.
    """
    if name == DIRECT:
        return "", ""
    medians = {
        router: _median(map(figure, measured)) for router, measured in _by(peers, lambda cost: cost.router)
    }
    of_rivals = [
        cost
        for router, cost in medians.items()
        if router.removesuffix(PAIR) in RIVALS and router.endswith(PAIR) == name.endswith(PAIR)
    ]
    base = min(of_rivals) if of_rivals else medians.get(PLAIN)
    return f"{medians[name]:{form}}", "" if base is None else f"{medians[name] / base:.2f}"


def _median(figures: Iterable[float]) -> float:
    return statistics.median(figures)


def missing_rivals() -> list[str]:
    """The rivals that are not installed."""
    return [name for name, command in RIVALS.items() if not Path(command[0]).exists()]


def versions() -> dict[str, str]:
    """What ran, and when: this machine, Python, and the rivals as their environments name them."""
    found = {
        "python": platform.python_version(),
        "cpus": str(psutil.cpu_count()),
        "date": time.strftime("%F"),
    }
    for name in RIVALS:
        package = name.replace("-", "_")
        for info in (RIVAL_FOLDER / name).glob(f"lib/*/site-packages/{package}-*.dist-info"):
            found[name] = info.name.removesuffix(".dist-info").partition("-")[2]
    return found


async def measure(name: str, figures: Figures, only: Sequence[str]) -> None:
    """What was asked for about one router."""
    async with router(name) as at:
        if "requests" in only and name != DIRECT:
            figures.requests.append(await request_cost(name, at))
        for count in STREAMS if "streams" in only else ():
            figures.streams.append(await stream_cost(name, at, count))
        if "lengths" in only and name in PAIRS:
            for length in LENGTHS:
                figures.lengths.append(await length_cost(name, at, length))


async def main(routers: Sequence[str], rounds: int, only: Sequence[str], json_file: Path | None) -> None:
    """Measure every router in turn, so that they never compete with each other."""
    figures = Figures()
    console = Console()
    missing = missing_rivals()
    for name in missing:
        console.print(f"{name} is not installed (make bench-proxy tries to): left out")
    for _ in range(rounds):
        for name in routers:
            if name.removesuffix(PAIR) not in missing:
                await measure(name, figures, only)
    show(figures, console)
    if json_file is not None:
        json_file.write_text(json.dumps({"versions": versions(), **asdict(figures)}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what the proxy costs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measure all in turn so often; medians are shown"
    )
    parser.add_argument(
        "--routers", nargs="+", choices=(*SINGLE, *PAIRS), default=(*SINGLE, *PAIRS), help="only these"
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="only these figures")
    options = parser.parse_args()
    uvloop.run(main(options.routers, options.rounds, options.only, options.json))
