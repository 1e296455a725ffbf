# SPDX-License-Identifier: Apache-2.0
"""D11: a server behind the proxy that sends without end, beside ordinary agents."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from kvferry.deploy.launcher import start_process
from tests.abuse.watch import Ordinary, complaints_about, control_window
from tests.standins.agents import StandInAgent
from tests.system.conftest import StartCluster

ABUSERS = 4
"""Streams that ask the bad server, all the time."""
ABUSE_S = 1.0
KINDS = ("header", "event", "events", "token-lines")
"""Of the stand-in's floods those that take the proxy any work; the unit tests have the others."""
MOST_GROWTH = 64 * 2**20
"""Events held back, 8 MiB for each stream, and what Python keeps of them."""


async def keep_asking(url: str, model: str) -> None:
    """Stream from the bad server, several at a time, again whenever it has cut one off; read what comes."""
    body = {"model": model, "prompt": "p", "stream": True}
    until = time.monotonic() + ABUSE_S

    async def ask() -> None:
        while time.monotonic() < until:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    async with http.post(f"{url}/v1/completions", json=body) as response:
                        async for _ in response.content.iter_any():
                            pass
            await asyncio.sleep(0.02)

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(ask() for _ in range(ABUSERS)))


@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_no_server_stops_the_streams_of_others(start_cluster: StartCluster, tmp_path: Path) -> None:
    """Once: an endless header line stalled the loop for 8.9 s, endless events 9.9 s, token lines 5.8 s."""
    # The bad server stays in rotation whatever it does: only then is every stream a fresh one.
    async with start_cluster(proxy_args=("--breaker-failures", "1000000")) as cluster:
        url, discovery = cluster.proxy.url, f"127.0.0.1:{cluster.proxy.listening['discovery_port']}"
        ordinary = Ordinary(url)
        control = await control_window(cluster, ordinary)
        for kind in KINDS:
            server = await start_process(kind, ("-m", "tests.standins.raw_server", "--kind", kind), tmp_path)
            async with StandInAgent(
                "both", (discovery,), model=kind, overrides={"address": server.url}
            ) as bad:
                await bad.until(lambda bad=bad: bad.acks)
                action = partial(keep_asking, url, kind)
                complaints = await complaints_about(action, cluster, ordinary, control, MOST_GROWTH)
                assert not complaints, kind
            await server.stop()
