# SPDX-License-Identifier: Apache-2.0
"""What a cluster costs while nobody asks anything, and after much was asked."""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import pairwise

import psutil
import pytest

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import Answer, complete_all, heldout
from tests.system.conftest import StartCluster

SETTLE_S = 2.0
WINDOW_S = 5.0
MAX_CPU_SHARE = 0.05
ROUNDS = 7
MAX_GROWTH = 0.01
"""From one round to the next, as a share of a process's memory after the first."""


def growth(sizes: list[int]) -> float:
    """Return the median growth from one round to the next, as a share of the first size.

    A leak grows in every round. What happens once (an arena, a table that doubles) is no leak, however large.
    """
    return statistics.median(after - before for before, after in pairwise(sizes)) / sizes[0]


def family(cluster: Cluster) -> dict[str, psutil.Process]:
    """Every process of the cluster by a readable name."""
    members = {}
    for process in cluster.processes:
        root = psutil.Process(process.pid)
        for member in [root, *root.children(recursive=True)]:
            words = [
                word for word in member.cmdline() if "agent" in word or "proxy" in word or word.isdigit()
            ]
            members[f"{process.name}/{'-'.join(words[:1])}/{member.pid}"] = member
    return members


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@pytest.mark.timeout(240)
async def test_idle_cpu_and_memory_after_load(start_cluster: StartCluster) -> None:
    """Idle processes use under 5 % of a core each; no memory grows with every round of 50 requests."""
    prompts = heldout(50)
    bodies = [
        {"model": "ferry-tiny", "prompt": prompt.prompt, "seed": index, "max_tokens": 24, "ignore_eos": True}
        for index, prompt in enumerate(prompts)
    ]
    async with start_cluster(args=("--tp", "2")) as cluster:
        members = family(cluster)
        sizes: dict[str, list[int]] = {name: [] for name in members}
        for _ in range(ROUNDS):
            await load(cluster.url, bodies)
            for name, member in members.items():
                sizes[name].append(member.memory_info().rss)
        leaks = {name: found for name, found in sizes.items() if growth(found) > MAX_GROWTH}
        assert not leaks, leaks
        await asyncio.sleep(SETTLE_S)
        before = {name: cpu_seconds(member) for name, member in members.items()}
        start = time.monotonic()
        await asyncio.sleep(WINDOW_S)
        elapsed = time.monotonic() - start
        shares = {name: (cpu_seconds(member) - before[name]) / elapsed for name, member in members.items()}
        busy = {name: share for name, share in shares.items() if share > MAX_CPU_SHARE}
        assert not busy, busy


def test_a_leak_is_told_from_a_step() -> None:
    steps = [100_000, 105_020, 105_020, 105_100, 105_100, 106_000, 106_000]
    assert growth(steps) <= MAX_GROWTH < growth([100_000 + 1_100 * each for each in range(7)])


async def load(url: str, bodies: list[dict[str, object]]) -> None:
    results = await complete_all(url, bodies, concurrency=16)
    assert all(isinstance(result, Answer) for result in results)
