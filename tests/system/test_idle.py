# SPDX-License-Identifier: Apache-2.0
"""What a cluster costs while nobody asks anything, and after much was asked."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from kvferry.deploy.launcher import Cluster
from tests.system.client import Answer, complete_all, heldout
from tests.system.conftest import StartCluster

SETTLE_S = 2.0
WINDOW_S = 5.0
MAX_CPU_SHARE = 0.05
MAX_GROWTH = 1.05


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
    """Idle processes use under 2 % of a core each; memory after the load is within 5 % of that after 50."""
    prompts = heldout(50)
    bodies = [
        {"model": "ferry-tiny", "prompt": prompt.prompt, "seed": index, "max_tokens": 24, "ignore_eos": True}
        for index, prompt in enumerate(prompts)
    ]
    async with start_cluster(args=("--tp", "2")) as cluster:
        members = family(cluster)
        await load(cluster.url, bodies)
        early = {name: member.memory_info().rss for name, member in members.items()}
        for _ in range(5):
            await load(cluster.url, bodies)
        grown = {
            name: member.memory_info().rss / early[name]
            for name, member in members.items()
            if member.memory_info().rss > early[name] * MAX_GROWTH
        }
        assert not grown, grown
        await asyncio.sleep(SETTLE_S)
        before = {name: cpu_seconds(member) for name, member in members.items()}
        start = time.monotonic()
        await asyncio.sleep(WINDOW_S)
        elapsed = time.monotonic() - start
        shares = {name: (cpu_seconds(member) - before[name]) / elapsed for name, member in members.items()}
        busy = {name: share for name, share in shares.items() if share > MAX_CPU_SHARE}
        assert not busy, busy


async def load(url: str, bodies: list[dict[str, object]]) -> None:
    results = await complete_all(url, bodies, concurrency=16)
    assert all(isinstance(result, Answer) for result in results)
