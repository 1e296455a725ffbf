# SPDX-License-Identifier: Apache-2.0
"""One cluster for the whole folder: whatever is done to it, the next test finds it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kvferry.deploy.launcher import Cluster, start_process
from tests.abuse.watch import Ordinary, Seen, control_window
from tests.system.conftest import StartAgent, StartCluster, log_dir, start_agent, start_cluster

__all__ = ["StartAgent", "log_dir", "start_agent", "start_cluster"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster() as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hostile(cluster: Cluster, log_dir: Path) -> AsyncIterator[None]:
    """The servers of `tests.standins.hostile` are behind the cluster's proxy."""
    discovery = f"127.0.0.1:{cluster.proxy.listening['discovery_port']}"
    process = await start_process("hostile", ("-m", "tests.standins.hostile", discovery), log_dir / "hostile")
    try:
        yield
    finally:
        await process.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ordinary(cluster: Cluster) -> Ordinary:
    return Ordinary(cluster.url)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def control(cluster: Cluster, hostile: None, ordinary: Ordinary) -> Seen:
    """What undisturbed streams look like here. The first window warms everything up."""
    await control_window(cluster, ordinary, 1.0)
    seen = await control_window(cluster, ordinary)
    print(f"control: {seen.summary()}")
    return seen
