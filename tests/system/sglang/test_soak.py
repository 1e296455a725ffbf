# SPDX-License-Identifier: Apache-2.0
"""A pair of SGLang servers at low load for long: nothing is wrong, nothing stays in use (`make test-sglang`).

`SGLANG_SOAK_S` is how long, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.client import Answer, complete, session
from tests.system.sglang.servers import MARKS, SglangServer, sglang_server
from tests.system.sglang.test_agents import bodies
from tests.system.sglang.test_kvferry import Stack, started
from tests.system.vllm.test_death import outcome

SOAK_S = float(os.environ.get("SGLANG_SOAK_S", "1200"))
CLIENTS = 3
PAUSE_S = 4.0
"""Of a client between two requests, at most."""
LEAVES = 0.1
"""Share of requests whose client leaves, after `LEFT_S` seconds at most."""
LEFT_S = 0.5
TOLD_S = 60.0
SEED = 7

pytestmark = MARKS


@pytest.mark.timeout(SOAK_S + 1800)
async def test_nothing_stays_in_use_after_a_long_time_at_low_load(tmp_path: Path) -> None:
    asked = bodies(32)
    async with sglang_server("plain", None, tmp_path) as plain, session() as http:
        wanted = [await complete(http, plain.url, each) for each in asked]
    async with started(tmp_path) as stack:
        found: Counter[str] = Counter()
        ends = time.monotonic() + SOAK_S
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(client(stack, asked, wanted, ends, random.Random(SEED + number), found))
            group.create_task(told(stack, ends, found))
        await stack.settled()
        print(f"{SOAK_S:.0f} s: {dict(found)}, {memory(stack)}", flush=True)
    assert found["right"] and set(found) <= {"right", "left"}


async def client(
    stack: Stack,
    asked: list[dict[str, Any]],
    wanted: list[Answer],
    ends: float,
    drawn: random.Random,
    found: Counter[str],
) -> None:
    """Send one request after the other, and leave some."""
    while time.monotonic() < ends:
        number = drawn.randrange(len(asked))
        asking = outcome(stack.http, stack.proxy_url, asked[number], wanted[number])
        try:
            async with asyncio.timeout(drawn.uniform(0, LEFT_S) if drawn.random() < LEAVES else None):
                found[await asking] += 1
        except TimeoutError:
            found["left"] += 1
        await asyncio.sleep(drawn.uniform(0, PAUSE_S))


async def told(stack: Stack, ends: float, found: Counter[str]) -> None:
    """Print now and then how it goes."""
    while (left := ends - time.monotonic()) > 0:
        print(f"{left:.0f} s to go: {dict(found)}, {memory(stack)}", flush=True)
        await asyncio.sleep(min(TOLD_S, left))


def memory(stack: Stack) -> dict[str, int]:
    """MiB that each server's schedulers have."""

    def resident(server: SglangServer) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in server.schedulers) >> 20

    return {"prefill": resident(stack.prefill), "decode": resident(stack.decode)}
