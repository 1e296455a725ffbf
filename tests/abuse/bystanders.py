# SPDX-License-Identifier: Apache-2.0
"""Ordinary clients beside an abusive one: 16 streams, and how long they stand still at worst."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

NUM_STREAMS = 16
SLACK_S = 1.0
"""How much longer than without abuse a stream may stand still."""


@dataclass(slots=True)
class Gaps:
    """`longest` stand of any stream in seconds, its first token included, and how many events came."""

    longest: float = 0.0
    events: int = 0


@asynccontextmanager
async def bystanders(url: str, model: str = "ferry-tiny") -> AsyncIterator[Gaps]:
    """Keep 16 streams going while open; each must succeed. All have begun when this is entered."""
    gaps = Gaps()
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    body = {"model": model, "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}

    async def stream(http: aiohttp.ClientSession, index: int) -> None:
        while True:
            last = time.monotonic()
            prompt = f"An ordinary question, number {index}."
            async with http.post(f"{url}/v1/completions", json={**body, "prompt": prompt}) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    assert b'"error"' not in line, line
                    now = time.monotonic()
                    if all(event.is_set() for event in begun):
                        gaps.longest = max(gaps.longest, now - last)
                    last = now
                    gaps.events += 1
                    begun[index].set()

    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        streams = [tasks.create_task(stream(http, index)) for index in range(NUM_STREAMS)]
        for event in begun:
            await event.wait()
        yield gaps
        for task in streams:
            task.cancel()


async def control_run(url: str, seconds: float = 3.0) -> Gaps:
    """The gaps of undisturbed streams on this machine, now."""
    async with bystanders(url) as gaps:
        await asyncio.sleep(seconds)
    return gaps


async def send(url: str, raw: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    """POST a body as it is. Returns status and the JSON of the response."""
    timeout = aiohttp.ClientTimeout(total=120)
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.post(f"{url}{path}", data=io.BytesIO(raw), headers=headers) as response,
    ):
        return response.status, await response.json()
