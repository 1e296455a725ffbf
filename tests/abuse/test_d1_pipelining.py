# SPDX-License-Identifier: Apache-2.0
"""D1, D6: connections without a key that send more than they wait for."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from tests.system.conftest import StartAgent, StartCluster

PIPELINED = b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
HEAD = b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nX-Pad: " + b"a" * 2**18
FLOOD_S = 3.0
MOST_GROWTH = 64 * 2**20
"""Before, 3 s of pipelining took 370 MB of a proxy and 350 MB of an agent; heads took 66 MB of an agent."""


async def flood(url: str, first: bytes, more: bytes) -> None:
    """Send without reading, over a new connection whenever one is closed."""
    parts = urlsplit(url)
    end = time.monotonic() + FLOOD_S
    while time.monotonic() < end:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(end - time.monotonic()):
                writer.write(first)
                while True:
                    await writer.drain()
                    writer.write(more)
        writer.transport.abort()


async def assert_harmless(url: str, pid: int) -> None:
    process = psutil.Process(pid)
    for first, more in ((PIPELINED, PIPELINED), (HEAD, b"a" * 2**18)):
        before = process.memory_info().rss
        await flood(url, first, more)
        assert process.memory_info().rss - before < MOST_GROWTH
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http,
            http.get(f"{url}/health") as response,
        ):
            assert response.status == 200


@pytest.mark.timeout(120)
async def test_an_agent_stays_flat(start_agent: StartAgent) -> None:
    async with start_agent() as agent:
        await assert_harmless(agent.url, agent.pid)


@pytest.mark.timeout(120)
async def test_a_proxy_stays_flat(start_cluster: StartCluster) -> None:
    async with start_cluster() as cluster:
        await assert_harmless(cluster.url, cluster.proxy.pid)
