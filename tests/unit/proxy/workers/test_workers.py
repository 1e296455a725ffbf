# SPDX-License-Identifier: Apache-2.0
"""`kvferry proxy --workers`: real processes on one port that answer as one proxy."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.workers.supervisor import WorkersFailed, reserved_port, running_workers
from tests.standins.agents import Fault, StandInAgent
from tests.unit.proxy.test_process import process

BODY = {"model": "stand-in", "prompt": "p", "max_tokens": 8}
DEADLINE_S = 20.0
# Three processes to start, beside whatever else runs on two cores.
pytestmark = pytest.mark.timeout(180)
OK = 'kvferry_requests_total{endpoint="completions",status="200"}'


@dataclass(slots=True)
class Crew:
    """A proxy of two workers. Every request has a connection of its own, so the kernel picks a worker."""

    hub: asyncio.subprocess.Process
    url: str
    discovery: str
    stack: AsyncExitStack

    async def agent(self, role: Any, **kwargs: Any) -> StandInAgent:
        agent = await self.stack.enter_async_context(StandInAgent(role, (self.discovery,), **kwargs))
        await agent.until(lambda: agent.acks, DEADLINE_S)
        return agent

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.hub.pid).children()

    def worker_of(self, port: int) -> psutil.Process:
        """The worker at the other end of a client's connection from `port`."""
        for worker in self.workers():
            with suppress(psutil.NoSuchProcess):
                for connection in worker.net_connections("tcp"):
                    if connection.raddr and connection.raddr.port == port:
                        return worker
        raise AssertionError("nobody serves this connection")

    async def post(
        self, path: str = "/v1/completions", body: Any = None, headers: dict[str, str] | None = None
    ) -> int:
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(self.url + path, json=body) as response,
        ):
            await response.read()
            return response.status

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[aiohttp.StreamReader]:
        """A stream that has begun."""
        body = {**BODY, "stream": True}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + "/v1/completions", json=body) as response,
        ):
            await response.content.readuntil(b"\n\n")
            yield response.content

    async def get(self, path: str) -> bytes:
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            return await response.read()

    async def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["incarnation"]: node for node in json.loads(await self.get("/nodes"))["nodes"]}

    async def sample(self, name: str) -> float:
        lines = (await self.get("/metrics")).decode().splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@asynccontextmanager
async def crew(*args: str) -> AsyncIterator[Crew]:
    async with process("--workers", "2", *args) as (child, listening), AsyncExitStack() as stack:
        yield Crew(child, listening["url"], f"127.0.0.1:{listening['discovery_port']}", stack)


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody has reaped yet has."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not claim():
            await asyncio.sleep(0.02)


async def test_a_keys_limit_is_that_of_all_workers(tmp_path: Path) -> None:
    """Issue 4, "Security" and "Routing": whichever worker a client's connections lead to."""
    keys = tmp_path / "keys"
    keys.write_text("client-key-0123456789 requests=12/h\n")
    async with crew("--api-keys", str(keys)) as proxy:
        headers = {"Authorization": "Bearer client-key-0123456789"}
        statuses = [await proxy.post(body=BODY, headers=headers) for _ in range(40)]
        assert statuses[:12] == [503] * 12
        assert statuses.count(429) >= 25, "each on its own would let 12 in; news may be late once or twice"
        proxy.hub.send_signal(signal.SIGTERM)
        log = await _log_of(proxy)
    served = {line.split()[3] for line in log.splitlines() if " request {" in line}
    assert len(served) == 2, "both workers had their share"


async def test_limits_drains_breakers_and_metrics_are_those_of_one_proxy() -> None:
    async with crew("--breaker-failures", "2", "--breaker-pause-s", "60", "--retries", "0") as proxy:
        prefill = await proxy.agent("prefill", max_running=2)
        decode = await proxy.agent("decode", max_running=2, interval_s=0.01)
        streamed = {**BODY, "stream": True}
        statuses = await asyncio.gather(*(proxy.post(body=streamed) for _ in range(24)))
        assert statuses == [200] * 24
        assert prefill.peak <= decode.peak == 2, "the limit is the fleet's, not each worker's"
        for _ in range(6):
            assert await proxy.sample(OK) == 24

        other = await proxy.agent("decode")
        assert await proxy.post(f"/nodes/{decode.incarnation}/drain") == 200
        for _ in range(6):
            assert (await proxy.nodes())[decode.incarnation]["drained"]
        assert [await proxy.post(body=BODY) for _ in range(12)] == [200] * 12
        assert (len(decode.asked), len(other.asked)) == (24, 12)

        assert await proxy.post(f"/nodes/{decode.incarnation}/undrain") == 200
        decode.faults = [Fault("decode", "status") for _ in range(12)]
        statuses = [await proxy.post(body=BODY) for _ in range(12)]
        assert sorted(statuses) == [200] * 10 + [502] * 2, "two failures open it for every worker"
        assert (await proxy.nodes())[decode.incarnation]["breaker"] == "open"

        workers = proxy.workers()
        other.interval_s = 0.05
        async with proxy.streaming() as stream:
            proxy.hub.send_signal(signal.SIGTERM)
            assert (await stream.read()).endswith(b"data: [DONE]\n\n"), "what runs may finish"
        assert await asyncio.wait_for(proxy.hub.wait(), DEADLINE_S) == 0
        assert not any(map(runs, workers))
        log = await _log_of(proxy)
    served = {line.split()[3] for line in log.splitlines() if " request {" in line}
    assert len(served) == 2, "both workers had their share"


async def test_a_killed_worker_is_replaced_and_costs_its_own_streams_and_the_hub_takes_all_along() -> None:
    async with crew() as proxy, aiohttp.ClientSession() as http:
        await proxy.agent("prefill")
        decode = await proxy.agent("decode", interval_s=0.05)
        assert await proxy.post(body=BODY) == 200
        counted = await proxy.sample(OK)
        streams: dict[int, list[aiohttp.ClientResponse]] = {}
        while len(streams) < 2:
            response = await http.post(
                proxy.url + "/v1/completions", json={**BODY, "max_tokens": 4000, "stream": True}
            )
            await response.content.readuntil(b"\n\n")
            assert response.connection is not None and response.connection.transport is not None
            port = response.connection.transport.get_extra_info("sockname")[1]
            streams.setdefault(proxy.worker_of(port).pid, []).append(response)
        killed, kept = sorted(streams, key=lambda pid: len(streams[pid]))
        psutil.Process(killed).kill()
        for response in streams[killed]:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        # What it held is free, and what the other holds is not.
        await decode.until(lambda: decode.running == len(streams[kept]), DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while (await proxy.nodes())[decode.incarnation]["in_flight"] != len(streams[kept]):
                await asyncio.sleep(0.02)
        await until(lambda: len(proxy.workers()) == 2)
        assert kept in {worker.pid for worker in proxy.workers()} and proxy.hub.returncode is None
        decode.interval_s = 0.0
        for response in streams[kept]:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        statuses = await asyncio.gather(*(proxy.post(body=BODY) for _ in range(8)))
        assert statuses == [200] * 8
        assert await proxy.sample(OK) >= counted + 8

        workers = proxy.workers()
        decode.interval_s = 0.05
        async with proxy.streaming() as stream:
            proxy.hub.kill()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n"), "what runs may finish"
        await until(lambda: not any(map(runs, workers)))


async def test_workers_that_do_not_live_end_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.proxy.workers.supervisor.sys.executable", "/bin/false")
    with pytest.raises(ExceptionGroup) as failed:
        async with running_workers(ProxyConfig(port=0, discovery_port=0, workers=2)):
            raise AssertionError("it cannot have started")
    assert failed.group_contains(WorkersFailed)


def test_a_port_where_somebody_listens_is_not_shared() -> None:
    """SO_REUSEPORT alone would let a second proxy take half of the first one's clients."""
    with (
        reserved_port("127.0.0.1", 0) as port,
        socket.create_server(("127.0.0.1", port), reuse_port=True),
        pytest.raises(OSError),
        reserved_port("127.0.0.1", port),
    ):
        raise AssertionError("taken")


async def _log_of(proxy: Crew) -> str:
    assert proxy.hub.stderr is not None
    return (await asyncio.wait_for(proxy.hub.stderr.read(), DEADLINE_S)).decode()
