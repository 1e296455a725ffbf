# SPDX-License-Identifier: Apache-2.0
"""What the proxy costs: CPU time of its process tree per SSE event and per request, and the time it adds.

Run it by `make bench-proxy`; what is measured, and how, is in `tests/bench/README.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

EVENT_INTERVAL_S = 0.02
STREAMS = (64, 256)
WINDOW_S = 4.0
PROBES = 200
WHOLE_REQUESTS = 6400
WHOLE_CONCURRENCY = 16
START_TIMEOUT_S = 30.0
DIRECT, PLAIN = "no router", "plain relay"
KVFERRY = ("kvferry, one agent", "kvferry, a pair")
RIVAL_FOLDER = Path("build/rivals")
"""Where `make bench-proxy` installs them, each in an environment of its own."""
RIVALS = {
    "vllm-router": (str(RIVAL_FOLDER / "vllm-router/bin/vllm-router"),),
    "sglang-router": (str(RIVAL_FOLDER / "sglang-router/bin/python"), "-m", "sglang_router.launch_router"),
}
BODY = {"model": "stand-in", "prompt": "a prompt of some words", "seed": 1}


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
class RequestCost:
    """One router answering requests that do not stream."""

    router: str
    cpu_ms_per_request: float


class StreamClient(asyncio.Protocol):
    """One streamed request over a bare socket: counts events at far less cost than the router under test."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None
        self.events = 0
        self.is_open = False
        self.ttfb = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"\n\n")
        if not self.ttfb.done() and b"data: " in data:
            self.ttfb.set_result(time.perf_counter() - self._sent_at)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if not self.ttfb.done():
            self.ttfb.set_exception(ConnectionError("the stream ended before its first event"))

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
async def router(name: str) -> AsyncIterator[Child]:
    """One router with the stand-in engines that it needs, ready to serve."""
    engine = ("tests.bench.engine", "--interval-s", str(EVENT_INTERVAL_S))
    async with AsyncExitStack() as stack:
        if name.startswith("kvferry"):
            started = child("proxy", "--port", "0", "--discovery-port", "0", "--log-level", "warning")
            proxy = await stack.enter_async_context(started)
            discovery = f"127.0.0.1:{proxy.listening['discovery_port']}"
            for role in ("both",) if name == "kvferry, one agent" else ("prefill", "decode"):
                await stack.enter_async_context(child(*engine, "--role", role, "--proxy", discovery))
            await _until_served(proxy.listening["url"])
            yield proxy
            return
        agent = await stack.enter_async_context(child(*engine))
        url = agent.listening["url"]
        if name == DIRECT:
            yield agent
        elif name == PLAIN:
            yield await stack.enter_async_context(child("tests.bench.plain_relay", url))
        else:
            yield await stack.enter_async_context(rival(RIVALS[name], url))


@asynccontextmanager
async def rival(command: Sequence[str], engine: str) -> AsyncIterator[Child]:
    """A router from the package index in front of one engine, by round robin, for as long as it is open."""
    ports = [_free_port(), _free_port()]
    process = await asyncio.create_subprocess_exec(
        *command, "--host", "127.0.0.1", "--port", str(ports[0]), "--worker-urls", engine,
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


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


async def request_cost(name: str, at: Child) -> RequestCost:
    """CPU per request that does not stream, over kept connections."""
    connector = aiohttp.TCPConnector(limit=WHOLE_CONCURRENCY)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def ask(times: int) -> None:
            for _ in range(times):
                body = {**BODY, "max_tokens": 2}
                async with http.post(f"{at.listening['url']}/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()

        share = WHOLE_REQUESTS // WHOLE_CONCURRENCY
        await asyncio.gather(*(ask(2) for _ in range(WHOLE_CONCURRENCY)))  # open the connections
        before = cpu_s(at.pid)
        await asyncio.gather(*(ask(share) for _ in range(WHOLE_CONCURRENCY)))
        spent = cpu_s(at.pid) - before
    return RequestCost(name, spent / (share * WHOLE_CONCURRENCY) * 1e3)


def cpu_s(pid: int) -> float:
    """User and system time of a process and all its descendants, in seconds."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


async def open_stream(at: Child) -> StreamClient:
    """A stream that goes on until somebody leaves."""
    url = urlsplit(at.listening["url"])
    body = json.dumps({**BODY, "max_tokens": 4000, "stream": True}).encode()
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


def show(streams: Sequence[StreamCost], requests: Sequence[RequestCost], console: Console) -> None:
    """Print both tables. Ratios are to the cheapest rival of this run, or to the plain relay without any."""
    table = Table(title=f"an event every {EVENT_INTERVAL_S * 1e3:.0f} ms per stream")
    for column in ("router", "streams", "events/s", "CPU µs/event", "ratio", "TTFB p50 ms", "p99 ms"):
        table.add_column(column, justify="left" if column == "router" else "right")
    for cost in streams:
        base = _base({each.router: each.cpu_us_per_event for each in streams if each.streams == cost.streams})
        table.add_row(
            cost.router,
            str(cost.streams),
            f"{cost.events_per_s:,.0f}",
            "" if cost.router == DIRECT else f"{cost.cpu_us_per_event:.1f}",
            "" if cost.router == DIRECT else f"{cost.cpu_us_per_event / base:.2f}",
            f"{cost.ttfb_p50_ms:.2f}",
            f"{cost.ttfb_p99_ms:.2f}",
        )
    console.print(table)
    table = Table(title="requests that do not stream")
    for column in ("router", "CPU ms/request", "ratio"):
        table.add_column(column, justify="left" if column == "router" else "right")
    base = _base({cost.router: cost.cpu_ms_per_request for cost in requests})
    for request in requests:
        ratio = request.cpu_ms_per_request / base
        table.add_row(request.router, f"{request.cpu_ms_per_request:.3f}", f"{ratio:.2f}")
    console.print(table)


def _base(figures: dict[str, float]) -> float:
    rivals = [figure for router, figure in figures.items() if router in RIVALS]
    return min(rivals) if rivals else figures[PLAIN]


def _versions() -> dict[str, str]:
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


async def main(json_file: Path | None) -> None:
    """Measure every router in turn, so that they never compete with each other."""
    streams: list[StreamCost] = []
    requests: list[RequestCost] = []
    console = Console()
    missing = [name for name, command in RIVALS.items() if not Path(command[0]).exists()]
    for name in missing:
        console.print(f"{name} is not installed (make bench-proxy tries to): left out")
    for name in (DIRECT, PLAIN, *(name for name in RIVALS if name not in missing), *KVFERRY):
        async with router(name) as at:
            if name != DIRECT:
                requests.append(await request_cost(name, at))
            for count in STREAMS:
                streams.append(await stream_cost(name, at, count))
    show(streams, requests, console)
    if json_file is not None:
        report = {
            "versions": _versions(),
            "streams": [asdict(cost) for cost in streams],
            "requests": [asdict(cost) for cost in requests],
        }
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what the proxy costs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    uvloop.run(main(parser.parse_args().json))
