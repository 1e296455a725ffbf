# SPDX-License-Identifier: Apache-2.0
"""What streams cost one proxy in memory: its resident size with thousands of them open, and without.

`make bench-streams`. Each stream is in mid-answer, with an event every half second.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack

import psutil
import uvloop

from benchmarks.proxy_cost import Child, StreamClient, child, open_stream

EVENT_INTERVAL_S = 0.5
WARM_STREAMS = 50
LIMIT_BYTES = 40 * 1024
OPEN_AT_ONCE = 100
TIMEOUT_S = 60.0


async def open_streams(at: Child, count: int) -> list[StreamClient]:
    """So many streams, each of which has had its first event."""
    clients: list[StreamClient] = []
    while len(clients) < count:
        wave = [await open_stream(at) for _ in range(min(OPEN_AT_ONCE, count - len(clients)))]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(client.ttfb for client in wave))
        clients += wave
    return clients


async def bytes_per_stream(count: int, roles: tuple[str, ...]) -> float:
    """How much larger the proxy's resident set is for each of `count` streams."""
    async with AsyncExitStack() as stack:
        options = ("--port", "0", "--discovery-port", "0", "--log-level", "warning")
        proxy = await stack.enter_async_context(child("proxy", *options))
        discovery = f"127.0.0.1:{proxy.listening['discovery_port']}"
        for role in roles:
            engine = ("benchmarks.engine", "--role", role, "--interval-s", str(EVENT_INTERVAL_S))
            await stack.enter_async_context(child(*engine, "--proxy", discovery))
        process = psutil.Process(proxy.pid)
        await asyncio.sleep(2 * EVENT_INTERVAL_S)  # for the engines' first pings
        warm = await open_streams(proxy, WARM_STREAMS)
        before = process.memory_info().rss
        clients = await open_streams(proxy, count)
        await asyncio.sleep(4 * EVENT_INTERVAL_S)
        grown = process.memory_info().rss - before
        assert all(client.is_open for client in warm + clients), "a stream ended early"
        return float(grown) / count


async def main(count: int) -> int:
    """Returns the exit status: 1 when a stream costs more than `LIMIT_BYTES`."""
    status = 0
    for name, roles in (("one agent", ("both",)), ("a pair", ("prefill", "decode"))):
        spent = await bytes_per_stream(count, roles)
        print(f"{count} streams through {name}: {spent / 1024:.1f} KiB each")
        status |= spent > LIMIT_BYTES
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    raise SystemExit(uvloop.run(main(parser.parse_args().streams)))
