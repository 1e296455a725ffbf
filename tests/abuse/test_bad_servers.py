# SPDX-License-Identifier: Apache-2.0
"""D11: a server behind the proxy that sends without end, beside ordinary agents."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from kvferry.deploy.launcher import start_process
from tests.abuse.watch import HEALTH_S, SLACK_S, Ordinary, Seen
from tests.standins.agents import StandInAgent
from tests.system.conftest import StartCluster

ABUSERS = 4
"""Streams that ask the bad server, all the time."""
ABUSE_S = 2.0
CONTROL_S = 3.0
KINDS = ("header", "event", "events", "token-lines")
"""Of the stand-in's floods those that take the proxy any work; the unit tests have the others."""
MOST_GROWTH = 64 * 2**20
"""Events held back, 8 MiB for each stream, and what Python keeps of them."""


async def keep_asking(url: str, model: str, until: float) -> None:
    """Stream from the bad server, again whenever it has been cut off; read what comes."""
    body = {"model": model, "prompt": "p", "stream": True}
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < until:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    async with http.post(f"{url}/v1/completions", json=body) as response:
                        async for _ in response.content.iter_any():
                            pass
            await asyncio.sleep(0.02)


async def health_s(url: str, until: float) -> float:
    """The longest that `/health` took."""
    longest = 0.0
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < until:
            began = time.monotonic()
            async with http.get(f"{url}/health") as response:
                assert response.status == 200
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.1)
    return longest


@pytest.mark.timeout(240)
async def test_no_server_stops_the_streams_of_others(start_cluster: StartCluster, tmp_path: Path) -> None:
    """Once: an endless header line stalled the loop for 8.9 s, endless events 9.9 s, token lines 5.8 s."""
    # The bad server stays in rotation whatever it does: only then is every stream a fresh one.
    async with start_cluster(proxy_args=("--breaker-failures", "1000000")) as cluster:
        url, discovery = cluster.proxy.url, f"127.0.0.1:{cluster.proxy.listening['discovery_port']}"
        proxy = psutil.Process(cluster.proxy.pid)
        ordinary, control, seen = Ordinary(url), Seen(), Seen()
        async with ordinary.streaming(control):
            await asyncio.sleep(CONTROL_S)
        async with ordinary.streaming(seen):
            for kind in KINDS:
                server = await start_process(
                    kind, ("-m", "tests.standins.raw_server", "--kind", kind), tmp_path
                )
                overrides = {"address": server.url}
                bad = StandInAgent("both", (discovery,), model=kind, overrides=overrides)
                async with bad:
                    await bad.until(lambda bad=bad: bad.acks)
                    before, until = proxy.memory_info().rss, time.monotonic() + ABUSE_S
                    seen.longest_gap = 0.0
                    *_, health = await asyncio.gather(
                        *(keep_asking(url, kind, until) for _ in range(ABUSERS)), health_s(url, until)
                    )
                    growth = proxy.memory_info().rss - before
                    print(
                        f"{kind}: gap {seen.longest_gap:.2f} s (control {control.longest_gap:.2f}), "
                        f"/health {health:.2f} s, {growth / 2**20:+.0f} MiB"
                    )
                    assert seen.longest_gap < control.longest_gap + SLACK_S
                    assert health < HEALTH_S
                    assert growth < MOST_GROWTH
                await server.stop()
