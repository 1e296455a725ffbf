# SPDX-License-Identifier: Apache-2.0
"""What an operator looks for in the log: one warning per cause and agent, and again if it lasts (W3)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from kvferry.agent.announce import ping
from kvferry.agent.announce.ping import ProxyConnection
from kvferry.common.curve import ClusterKey
from kvferry.common.engine_servers import monitor
from kvferry.common.telemetry import recurring_warnings
from kvferry.deploy import keygen
from tests.helpers.servers import free_port
from tests.helpers.waiting import until
from tests.standins.agents import StandInAgent
from tests.unit.proxy.builders import registration
from tests.unit.proxy.conftest import Stage, StartStage

DEADLINE_S = 15.0


def warnings_of(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """The proxy's warnings that have all of these words."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and not record.name.startswith("kvferry.agent")
        if all(word in record.getMessage() for word in words)
    ]


def keys(tmp_path: Path) -> dict[str, ClusterKey]:
    found = {}
    for name in ("ours", "theirs"):
        assert keygen.main([str(tmp_path / name)]) == 0
        found[name] = ClusterKey.read(tmp_path / name)
    return found


async def pinging(address: str, key: ClusterKey | None, condition: Callable[[], object]) -> None:
    """Ping as an agent does until the condition holds."""
    connection = ProxyConnection(address, key)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                connection.send(registration("decode", 1))
                await asyncio.sleep(0.02)
    finally:
        connection.close().join(5.0)


@pytest.mark.parametrize(
    ("proxys", "agents", "reason", "words"),
    [
        ("ours", "theirs", "other_key", "its cluster key differs"),
        ("ours", None, "no_key", "no cluster key"),
        (None, "theirs", "unexpected_key", "this proxy has none"),
    ],
)
async def test_a_wrong_or_missing_cluster_key(
    start_stage: StartStage, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, proxys: str | None, agents: str | None, reason: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(ping, "_RECONNECT_S", 0.2)
    made = keys(tmp_path)
    stage = await start_stage(cluster_key=proxys and tmp_path / proxys)
    metric = f'kvferry_proxy_rejected_cluster_keys_total{{reason="{reason}"}}'
    assert f"{metric} 0.0" in stage.proxy.services.metrics.exposition().decode(), "shown before its first"
    key = made[agents] if agents else None
    await pinging(stage.discovery, key, lambda: warnings_of(caplog, "127.0.0.1", words))
    counted = stage.metric(metric)
    assert counted
    await pinging(stage.discovery, key, lambda: stage.metric(metric) >= counted + 3)
    assert len(warnings_of(caplog, "127.0.0.1", words)) == 1, "once, however often it tries"
    monkeypatch.setattr(recurring_warnings, "REPEAT_S", 0.0)
    await pinging(stage.discovery, key, lambda: len(warnings_of(caplog, "127.0.0.1", words)) > 1)
    assert not stage.proxy.fleet.registry.num_agents


@pytest.mark.parametrize("with_key", [False, True], ids=["no key", "key"])
async def test_http_on_the_discovery_port(
    start_stage: StartStage, tmp_path: Path, caplog: pytest.LogCaptureFixture, with_key: bool
) -> None:
    """A bare TCP connection, as health checks make, is none."""
    keys(tmp_path)
    stage = await start_stage(cluster_key=tmp_path / "ours" if with_key else None)
    host, _, port = stage.discovery.rpartition(":")
    for _ in range(3):
        socket.create_connection((host, int(port))).close()
    await asyncio.sleep(0.3)
    assert not warnings_of(caplog, "127.0.0.1")

    async def ask_http() -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=0.5)
            async with stage.http.get(f"http://{stage.discovery}/health", timeout=timeout):
                pass

    async with asyncio.timeout(DEADLINE_S):
        while not warnings_of(caplog, "127.0.0.1", "HTTP"):
            await ask_http()
    await ask_http()
    await asyncio.sleep(0.3)
    assert len(warnings_of(caplog, "127.0.0.1", "HTTP")) == 1
    agent = await stage.bring(StandInAgent("decode", (stage.discovery,))) if not with_key else None
    assert agent is None or agent.acks, "agents are served as before"


async def test_an_agent_that_has_the_http_port_as_its_proxy(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    address = stage.proxy.url.removeprefix("http://")
    await pinging(address, None, lambda: warnings_of(caplog, "127.0.0.1", "--proxy", "HTTP port"))
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await pinging(address, None, lambda: False)
    assert len(warnings_of(caplog, "127.0.0.1", "--proxy", "HTTP port")) == 1


async def test_a_named_server_that_is_down(
    start_stage: StartStage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "PROBE_INTERVAL_S", 0.05)
    down = {role: f"http://127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
    await start_stage(dialect="vllm-nixl", prefill=(down["prefill"],), decode=(down["decode"],))
    for role, address in down.items():
        await until(lambda role=role, address=address: warnings_of(caplog, role, address, "is down"))
    await asyncio.sleep(1.2)
    for role, address in down.items():
        assert len(warnings_of(caplog, role, address)) == 1
    monkeypatch.setattr(recurring_warnings, "REPEAT_S", 0.0)
    await until(lambda: len(warnings_of(caplog, "prefill", down["prefill"])) > 1)


async def test_agents_that_do_not_fit_each_other(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody scrapes `/metrics`. An agent that fits none of many is one warning."""
    prefills = [await stage.agent("prefill", overrides={"name": f"p-{number}"}) for number in range(3)]
    await stage.agent("decode")
    odd = await stage.agent("decode", overrides={"layout": "another", "name": "odd"})
    address = f"{odd.host}:{odd.port}"
    await until(lambda: warnings_of(caplog, "odd", address, "different KV layouts"))
    await asyncio.sleep(2.2)
    [warning] = warnings_of(caplog, "cannot serve together")
    assert any(f"{each.host}:{each.port}" in warning for each in prefills)


async def test_an_agent_that_is_lost_is_named(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = await stage.agent("decode", overrides={"name": "decode-7"})
    leaves = await stage.agent("prefill", overrides={"name": "prefill-7"})
    stage.proxy.fleet.registry.bye(leaves.incarnation)
    await leaves.silence()
    await lost.silence()
    address = f"{lost.host}:{lost.port}"
    await until(lambda: warnings_of(caplog, "decode-7", address, "was lost"))
    await asyncio.sleep(1.2)
    assert len(warnings_of(caplog, "was lost")) == 1, "the other one has said goodbye"
    monkeypatch.setattr(recurring_warnings, "REPEAT_S", 0.0)
    await until(lambda: len(warnings_of(caplog, "decode-7", address)) > 1)


async def test_an_agent_that_is_rejected_is_named(
    start_stage: StartStage, caplog: pytest.LogCaptureFixture
) -> None:
    stage = await start_stage(allow_address="10.0.0.0/8")
    rogue = StandInAgent("decode", (stage.discovery,))
    async with rogue:
        await until(lambda: warnings_of(caplog, rogue.address, "--allow-address"))
        await asyncio.sleep(0.5)
        assert len(warnings_of(caplog, rogue.address)) == 1
