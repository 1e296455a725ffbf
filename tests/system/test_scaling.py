# SPDX-License-Identifier: Apache-2.0
"""The signals to scale by, with real agents, at twice what they can do."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.deploy.launcher import start_process
from tests.helpers.client import session
from tests.helpers.commands import PROXY
from tests.helpers.metrics import scrape, total
from tests.system.conftest import StartCluster

MODEL = "ferry-tiny"
CLIENTS = 24
"""More than the agents' slots."""
FLOOD_S, LOAD_S = 20.0, 60.0
MIXES = {
    "long prompts, short answers": (900, 4),
    "short prompts, long answers": (20, 150),
    "balanced": (300, 40),
}
"""Tokens of prompts and of answers."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@asynccontextmanager
async def two_proxies(start_cluster: StartCluster, log_dir: Path) -> AsyncIterator[tuple[str, str]]:
    """A prefill and a decode agent with few slots, behind two proxies."""
    other = await start_process("other-proxy", PROXY, log_dir)
    try:
        proxy = f"127.0.0.1:{other.listening['discovery_port']}"
        args = ("--proxy", proxy, "--max-num-seqs", "8")
        async with start_cluster(args=args) as cluster:
            yield cluster.url, other.url
    finally:
        await other.stop()


async def ask(http: aiohttp.ClientSession, url: str, mix: tuple[int, int], number: int) -> bool:
    """Whether the request was served; it may be rejected."""
    ids = random.Random(number).choices(range(5, 60), k=mix[0])
    body: dict[str, Any] = {"model": MODEL, "prompt": ids, "max_tokens": mix[1], "ignore_eos": True}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        await response.read()
        assert response.status in (200, 429), response.status
        return response.status == 200


async def can_do(http: aiohttp.ClientSession, urls: tuple[str, str], mix: tuple[int, int]) -> float:
    """Requests per second that are served when there are always more."""
    loop, numbers = asyncio.get_running_loop(), itertools.count()
    end = loop.time() + FLOOD_S
    served: list[float] = []

    async def client(url: str) -> None:
        while loop.time() < end:
            if await ask(http, url, mix, next(numbers)):
                served.append(loop.time())

    async with asyncio.TaskGroup() as tasks:
        for url in itertools.islice(itertools.cycle(urls), CLIENTS):
            tasks.create_task(client(url))
    half = end - FLOOD_S / 2
    return sum(half <= each < end for each in served) / (FLOOD_S / 2)


async def load(http: aiohttp.ClientSession, urls: tuple[str, str], mix: tuple[int, int], rate: float) -> None:
    """Send requests at random moments, whatever becomes of those before, and leave at the end."""
    loop, noise, numbers = asyncio.get_running_loop(), random.Random(1), itertools.count(100_000)
    end = due = loop.time()
    end += LOAD_S
    async with asyncio.TaskGroup() as tasks:
        asked = []
        while due < end:
            due += noise.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            number = next(numbers)
            asked.append(tasks.create_task(ask(http, urls[number % 2], mix, number)))
        for task in asked:
            task.cancel()


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
async def test_at_twice_what_they_can_do_two_are_wanted(
    mix: tuple[int, int], start_cluster: StartCluster, tmp_path: Path
) -> None:
    """Of the role that limits, of which there is one: right within one."""
    async with two_proxies(start_cluster, tmp_path) as urls, session() as http:
        rate = await can_do(http, urls, mix)
        await load(http, urls, mix, 2 * rate)
        pages = [await scrape(url) for url in urls]
        parts = [
            {role: total(page, "kvferry_proxy_wanted_agents", role=role) for role in ("prefill", "decode")}
            for page in pages
        ]
        wanted = {role: sum(part[role] for part in parts) for role in ("prefill", "decode")}
        print(f"{rate=:.2f} {parts=} {wanted=}")
        assert 1.0 < max(wanted.values()) <= 3.0, (rate, parts)
        assert all(0.25 < part["prefill"] / wanted["prefill"] < 0.75 for part in parts), parts
