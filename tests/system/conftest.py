# SPDX-License-Identifier: Apache-2.0
"""Clusters of real processes for the system tests."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kvferry.common.roles import Role
from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec, Process, start_process
from tests.helpers.commands import AGENT

MODEL = "ferry-tiny"
FOLDERS = ("agent", "common", "deploy", "proxy", "transfer")
TRAP = "raise ImportError(f'{__file__} was imported')\n"
# Every test that compares answers wants a cold prefix cache (I4), and one thread per rank on small machines.
COMMON_ARGS = ("--prefix-cache", "false", "--threads", "1")

StartCluster = Callable[..., AbstractAsyncContextManager[Cluster]]
StartAgent = Callable[..., AbstractAsyncContextManager[Process]]


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def start_cluster(log_dir: Path) -> StartCluster:
    """`start_cluster(prefill=1, decode=1, prefill_args=(), …)`: a ready cluster as an async context."""

    @asynccontextmanager
    async def start(
        *,
        prefill: int = 1,
        decode: int = 1,
        both: int = 0,
        args: tuple[str, ...] = (),
        prefill_args: tuple[str, ...] = (),
        decode_args: tuple[str, ...] = (),
        module: str = "kvferry.agent",
        proxy_args: tuple[str, ...] = (),
        model: str = MODEL,
        trust: ssl.SSLContext | None = None,
        admin_key: str | None = None,
    ) -> AsyncIterator[Cluster]:
        wanted: dict[Role, tuple[int, tuple[str, ...]]] = {
            "prefill": (prefill, prefill_args),
            "decode": (decode, decode_args),
            "both": (both, ()),
        }
        agents = [
            AgentSpec(name=f"{role}-{index}", role=role, args=(*COMMON_ARGS, *args, *own_args), module=module)
            for role, (count, own_args) in wanted.items()
            for index in range(count)
        ]
        number = len(list(log_dir.iterdir()))
        spec = ClusterSpec(
            model=model,
            agents=tuple(agents),
            log_dir=log_dir / f"{number}",
            proxy_args=proxy_args,
            trust=trust,
            admin_key=admin_key,
        )
        async with Cluster(spec) as cluster:
            await cluster.wait_ready()
            yield cluster

    return start


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    """A pair behind its proxy, for tests that only ask; others need one of their own."""
    async with start_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def start_agent(log_dir: Path) -> StartAgent:
    """`start_agent(*args)`: one agent with role `both` and no proxy, ready, as an async context."""

    @asynccontextmanager
    async def start(*args: str, model: str = MODEL) -> AsyncIterator[Process]:
        number = len(list(log_dir.iterdir()))
        argv = (*AGENT, "--role", "both", "--model", model)
        process = await start_process("both", (*argv, *COMMON_ARGS, *args), log_dir / f"{number}")
        try:
            await wait_ready(process)
            yield process
        finally:
            await process.stop()

    return start


async def wait_ready(process: Process, timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
        while True:
            assert process.process.returncode is None, process.log_tail()
            async with http.get(f"{process.url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


@pytest.fixture
def trap_folder(tmp_path: Path) -> Path:
    """A working directory with a module for each of our folders, which must not be imported."""
    for name in FOLDERS:
        tmp_path.joinpath(f"{name}.py").write_text(TRAP)
    return tmp_path


@pytest.fixture
def trap_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which `proxy.py` is installed: its distribution holds a top-level package `proxy`."""
    site = tmp_path / "site-packages"
    for package in ("proxy", "proxy/core", "proxy/http"):
        site.joinpath(package).mkdir(parents=True)
        site.joinpath(package, "__init__.py").write_text(TRAP)
    return {**os.environ, "PYTHONPATH": str(site)}
