# SPDX-License-Identifier: Apache-2.0
"""A server that announces itself from its engine drains when a proxy or its starter asks for that."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.agent.announce.drain_socket import DRAIN, DRAINED
from kvferry.agent.announce.embedded import Announcement, Server
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet.registry import ROLES
from kvferry.proxy.fleet.snapshot import Node
from kvferry.proxy.server import RunningProxy, running_proxy
from kvferry.proxy.telemetry.agent_reports import AgentReports
from kvferry.proxy.wire.registration import Capacity, Incarnation, WorkReport
from tests.helpers.waiting import until
from tests.unit.transfer.rig import GEOMETRY

DEADLINE_S = 20.0
SERVER = Server(
    dialect="vllm-kvferry", address="http://127.0.0.1:9", host="127.0.0.1", api=("127.0.0.1", 9),
    role="both", incarnation=Incarnation("i"), model="m", max_model_len=10, tp_size=1,
    geometry=GEOMETRY, weights="w", tokenizer="t", num_blocks=8, max_running=4, device="cpu", host_id="h",
    prefill_chunk=2048,
)  # fmt: skip


@dataclass
class Work:
    """What runs at the server, and how much KV it has lent."""

    requests: int = 1
    running: int = 1
    steps: int = 0
    leased_blocks: int = 0
    capacity: Capacity | None = None
    work: WorkReport | None = None
    leased: int = 1
    control_port: int = 1
    transfers: tuple[str, ...] = ("tcp",)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def stats(self) -> Any:
        return SimpleNamespace(leased=self.leased)


def nodes(proxy: RunningProxy) -> list[Node]:
    return list(proxy.fleet.registry.snapshot().nodes)


@pytest.mark.parametrize("asked", ["on the socket", "by a proxy"])
async def test_a_drain_is_announced_and_is_over_when_nobody_needs_the_server(
    asked: str, tmp_path: Path
) -> None:
    work, connected = Work(), asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        connected.set()
        assert await reader.readline() == DRAINED
        work.drained.set()
        writer.close()

    async with (
        running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy,
        await asyncio.start_unix_server(serve, tmp_path / "drain"),
        asyncio.TaskGroup() as tasks,
    ):
        announcement = Announcement(
            SERVER,
            work,
            lambda: 8,
            proxies=(f"127.0.0.1:{proxy.discovery_port}",),
            drain_socket=str(tmp_path / "drain"),
        )
        running = tasks.create_task(announcement.run(cast(Any, work)))
        await until(lambda: nodes(proxy))
        await connected.wait()
        if asked == "by a proxy":
            assert proxy.fleet.drain(Incarnation("i"))
        else:
            writers[0].write(DRAIN)
        await until(lambda: nodes(proxy)[0].info.state == "draining")
        for name in ("requests", "leased"):
            await asyncio.sleep(0.5)
            assert not work.drained.is_set(), name
            setattr(work, name, 0)
        await asyncio.wait_for(work.drained.wait(), DEADLINE_S)
        await until(lambda: not nodes(proxy))  # vLLM kills the announcement's process in a moment
        assert proxy.fleet.registry.lost == dict.fromkeys(ROLES, 0), "it has said bye"
        running.cancel()


async def test_a_server_that_nobody_ends_goes_on_when_it_has_drained() -> None:
    work = Work(requests=0, leased=0)
    async with (
        running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy,
        asyncio.TaskGroup() as tasks,
    ):
        proxies = (f"127.0.0.1:{proxy.discovery_port}",)
        announcement = Announcement(SERVER, work, lambda: 8, proxies=proxies)
        running = tasks.create_task(announcement.run(cast(Any, work)))
        await until(lambda: nodes(proxy))
        assert proxy.fleet.drain(Incarnation("i"))
        await until(lambda: nodes(proxy)[0].info.state == "draining")
        await asyncio.sleep(1.5)  # for two more pings
        assert nodes(proxy)[0].info.state == "draining"
        running.cancel()
    assert not nodes(proxy), "it has said bye"


async def test_what_the_server_has_pulled_is_added_up_by_the_proxy() -> None:
    """From when the proxy has heard it first; the operator's page shows it."""
    work = Work(work=WorkReport(pull_bytes=1_000_000))
    async with running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy, asyncio.TaskGroup() as tasks:
        reports = AgentReports(proxy.fleet.clock)
        proxy.fleet.registry.subscribe(reports.note)
        proxies = (f"127.0.0.1:{proxy.discovery_port}",)
        announcement = Announcement(SERVER, work, lambda: 8, proxies=proxies)
        running = tasks.create_task(announcement.run(cast(Any, work)))
        await until(lambda: nodes(proxy) and nodes(proxy)[0].info.work == work.work)
        info = nodes(proxy)[0].info
        assert (info.device, info.prefill_chunk) == ("cpu", 2048)
        assert info.uptime_s is not None and info.uptime_s > 0.0
        work.work = WorkReport(pull_bytes=1_000_007, failures={"deadline": 1})
        await until(lambda: reports.totals().pull_bytes)
        running.cancel()
    assert reports.totals().pull_bytes == 7
    assert reports.failures() == {"deadline": 1}
