# SPDX-License-Identifier: Apache-2.0
"""`kvferry proxy --workers`: real processes on one port."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet.scaling import ARRIVALS_S, LEAST_AGE_S
from kvferry.proxy.wire.registration import Capacity
from kvferry.proxy.workers.messages import HEARTBEAT_INTERVAL_S
from kvferry.proxy.workers.supervisor import MAX_MISSED, WorkersFailed, reserved_port, running_workers
from tests.helpers.waiting import until
from tests.standins.agents import StandInAgent
from tests.unit.proxy.exposition import sample
from tests.unit.proxy.test_process import process

BODY = {"model": "stand-in", "prompt": "p", "max_tokens": 8}
DEADLINE_S = 20.0
# Up to five processes to start, beside whatever else runs on two cores.
pytestmark = pytest.mark.timeout(180)
OK = 'kvferry_proxy_requests_total{endpoint="completions",status="200"}'


@dataclass(slots=True)
class Workers:
    """A proxy of several workers. Every request has a connection of its own, so the kernel picks a worker."""

    supervisor: asyncio.subprocess.Process
    url: str
    discovery: str
    stack: AsyncExitStack
    reading: asyncio.Task[bytes]
    """Reads the log to its end, so that it never fills the pipe and blocks a process."""

    async def agent(self, role: Any, **kwargs: Any) -> StandInAgent:
        agent = await self.stack.enter_async_context(StandInAgent(role, (self.discovery,), **kwargs))
        await agent.until(lambda: agent.acks, DEADLINE_S)
        return agent

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.supervisor.pid).children()

    def worker_pids(self) -> dict[int, int]:
        """For each port of a client's connection, the worker that has it."""
        pids = {}
        for worker in self.processes():
            with suppress(psutil.NoSuchProcess):
                pids |= {each.raddr.port: worker.pid for each in worker.net_connections("tcp") if each.raddr}
        return pids

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

    async def get(self, path: str) -> tuple[int, bytes]:
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            return response.status, await response.read()

    async def nodes(self) -> dict[str, dict[str, Any]]:
        _, body = await self.get("/nodes")
        return {node["incarnation"]: node for node in json.loads(body)["nodes"]}

    async def sample(self, name: str) -> float:
        return sample((await self.get("/metrics"))[1].decode(), name)

    async def log(self) -> str:
        return (await asyncio.wait_for(self.reading, DEADLINE_S)).decode()


@asynccontextmanager
async def running(count: int, *args: str) -> AsyncIterator[Workers]:
    async with process("--workers", str(count), *args) as (child, listening), AsyncExitStack() as stack:
        assert child.stderr is not None
        reading = asyncio.create_task(child.stderr.read())
        try:
            discovery = f"127.0.0.1:{listening['discovery_port']}"
            yield Workers(child, listening["url"], discovery, stack, reading)
        finally:
            reading.cancel()
            await asyncio.wait([reading])


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody has reaped yet has."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def served_by(log: str) -> set[str]:
    """The workers that a log of requests names."""
    return {line.split()[3] for line in log.splitlines() if " request {" in line}


async def test_a_keys_limit_is_each_workers(tmp_path: Path) -> None:
    """As with two proxies: docs/workers.md says so."""
    keys = tmp_path / "keys"
    keys.write_text("client-key-0123456789 requests=12/h\n")
    async with running(2, "--api-keys", str(keys)) as proxy:
        headers = {"Authorization": "Bearer client-key-0123456789"}
        statuses = [await proxy.post(body=BODY, headers=headers) for _ in range(60)]
        assert statuses[:12] == [503] * 12
        assert statuses.count(503) == 24 and statuses.count(429) == 36
        proxy.supervisor.send_signal(signal.SIGTERM)
        assert len(served_by(await proxy.log())) == 2, "both workers had their share"


@pytest.mark.parametrize("count", [2, 4])
async def test_limits_are_per_worker_and_operators_see_one_proxy(count: int) -> None:
    async with running(count) as proxy:
        prefill = await proxy.agent("prefill", max_running=2)
        decode = await proxy.agent("decode", max_running=2, interval_s=0.01)
        streamed = {**BODY, "stream": True}
        statuses = await asyncio.gather(*(proxy.post(body=streamed) for _ in range(24 * count)))
        assert statuses == [200] * (24 * count), "the agent's own queue takes the overshoot"
        assert prefill.peak <= 2 * count and decode.peak <= 2 * count
        for _ in range(3 * count):
            assert await proxy.sample(OK) == 24 * count
            assert await proxy.sample('kvferry_proxy_nodes{role="decode",state="ready"}') == 1

        other = await proxy.agent("decode")
        assert await proxy.post(f"/nodes/{decode.incarnation}/cordon") == 200
        for _ in range(3 * count):
            assert (await proxy.nodes())[decode.incarnation]["state"] == "cordoned"
        asked = len(decode.asked)
        assert [await proxy.post(body=BODY) for _ in range(6 * count)] == [200] * (6 * count)
        assert (len(decode.asked), len(other.asked)) == (asked, 6 * count), "it reached every worker"
        assert await proxy.post(f"/nodes/{decode.incarnation}/uncordon") == 200
        assert (await proxy.nodes())[decode.incarnation]["state"] == "ready"

        workers = proxy.processes()
        assert len(workers) == count
        other.interval_s = decode.interval_s = 0.05
        async with proxy.streaming() as stream:
            proxy.supervisor.send_signal(signal.SIGTERM)
            assert (await stream.read()).endswith(b"data: [DONE]\n\n"), "what runs may finish"
        assert await asyncio.wait_for(proxy.supervisor.wait(), DEADLINE_S) == 0
        assert not any(map(runs, workers))
        assert len(served_by(await proxy.log())) == count, "all workers had their share"


async def test_signals_to_scale_by_are_those_of_all_workers() -> None:
    measured = Capacity(prompts=10, prefill_s=5.0)
    async with running(2) as proxy:
        started_at = time.monotonic()
        prefill = await proxy.agent("prefill")
        await proxy.agent("decode")
        prefill.overrides |= {"capacity": measured}
        wanted = 'kvferry_proxy_wanted_agents{model_name="stand-in",role="prefill"}'
        async with asyncio.timeout(DEADLINE_S):
            while wanted not in (await proxy.get("/metrics"))[1].decode():
                await asyncio.sleep(0.02)
        assert [await proxy.post(body=BODY) for _ in range(24)] == [200] * 24
        number, age = await proxy.sample(wanted), max(LEAST_AGE_S, time.monotonic() - started_at)
        mean = math.exp(-age / ARRIVALS_S) / (ARRIVALS_S * -math.expm1(-age / ARRIVALS_S))
        assert number >= 24 * 0.5 * mean, "about half of it is one worker's"


async def test_a_killed_worker_costs_its_own_streams_and_is_replaced_by_one_that_knows_the_fleet() -> None:
    async with running(2) as proxy, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        # The new worker is to be up before these ping again.
        await proxy.agent("prefill", max_running=64)
        decode = await proxy.agent("decode", max_running=64, interval_s=0.2)
        assert await proxy.post(body=BODY) == 200

        async def begin() -> tuple[int, aiohttp.ClientResponse]:
            body = {**BODY, "max_tokens": 2000, "stream": True}
            response = await http.post(proxy.url + "/v1/completions", json=body)
            await response.content.readuntil(b"\n\n")
            assert response.connection is not None and response.connection.transport is not None
            return response.connection.transport.get_extra_info("sockname")[1], response

        begun = await asyncio.gather(*(begin() for _ in range(64)))
        pids = proxy.worker_pids()
        streams: dict[int, list[aiohttp.ClientResponse]] = defaultdict(list)
        for port, response in begun:
            streams[pids[port]].append(response)
        assert len(streams) == 2
        in_flight = [(await proxy.nodes())[decode.incarnation]["in_flight"] for _ in range(4)]
        assert in_flight == [64] * 4
        counted = await proxy.sample(OK)
        victim, survivor = streams
        psutil.Process(victim).kill()
        for response in streams[victim]:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await until(lambda: victim not in {worker.pid for worker in proxy.processes()})

        # The port keeps answering; no counter falls; whoever answers knows the agents.
        served = 0
        while len(proxy.processes()) < 2 or served < 40:
            assert await proxy.post(body={**BODY, "max_tokens": 1}) == 200
            served += 1
            assert await proxy.sample(OK) >= counted
            assert (await proxy.nodes())[decode.incarnation]["in_flight"] == len(streams[survivor])
        (replacement,) = [each for each in proxy.processes() if each.pid != survivor]
        answered = set()
        async with asyncio.timeout(DEADLINE_S):
            while replacement.pid not in answered:
                async with http.post(
                    proxy.url + "/v1/completions", json={**BODY, "max_tokens": 3, "stream": True}
                ) as response:
                    assert response.status == 200
                    await response.content.readuntil(b"\n\n")
                    assert response.connection is not None and response.connection.transport is not None
                    port = response.connection.transport.get_extra_info("sockname")[1]
                    answered.add(proxy.worker_pids()[port])
                    response.close()
        assert proxy.supervisor.returncode is None
        decode.interval_s = 0.0
        for response in streams[survivor]:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await decode.until(lambda: not decode.running, DEADLINE_S)
        assert await proxy.sample(OK) >= counted + served + len(streams[survivor])


async def test_a_stopped_worker_is_replaced_within_seconds() -> None:
    """N9: after 25 s only, and meanwhile its share of the clients' connections hung."""
    async with running(2) as proxy:
        victim, other = proxy.processes()
        victim.suspend()
        stopped_at = time.monotonic()
        await until(lambda: not runs(victim))
        assert time.monotonic() - stopped_at < 2 * MAX_MISSED * HEARTBEAT_INTERVAL_S
        await until(lambda: len(proxy.processes()) == 2 and not runs(victim))
        assert runs(other)
        assert (await proxy.get("/health"))[0] == 200


async def test_a_host_that_pauses_costs_no_worker() -> None:
    """N9: silence counts only while the supervisor itself runs."""
    async with running(2) as proxy:
        workers = proxy.processes()
        paused = [psutil.Process(proxy.supervisor.pid), *workers]
        for each in paused:
            each.suspend()
        await asyncio.sleep(1.5 * MAX_MISSED * HEARTBEAT_INTERVAL_S)
        for each in paused:  # the supervisor first
            each.resume()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        await asyncio.sleep(MAX_MISSED * HEARTBEAT_INTERVAL_S)
        assert {each.pid for each in workers} == {each.pid for each in proxy.processes()}


async def test_when_the_supervisor_hangs_clients_are_served_and_when_it_dies_its_workers_end() -> None:
    async with running(2) as proxy:
        await proxy.agent("prefill")
        decode = await proxy.agent("decode")
        assert await proxy.post(body=BODY) == 200
        workers = proxy.processes()
        proxy.supervisor.send_signal(signal.SIGSTOP)
        asking = asyncio.ensure_future(proxy.get("/nodes"))
        # Pings reach nobody now, so this is for as long as agents are believed.
        assert [await proxy.post(body=BODY) for _ in range(8)] == [200] * 8
        assert (await proxy.get("/v1/models"))[0] == 200
        status, body = await asking
        assert (status, json.loads(body)["error"]["code"]) == (503, "supervisor_unavailable")
        proxy.supervisor.send_signal(signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_S):
            while await proxy.post(body=BODY) != 200:
                await asyncio.sleep(0.1)
        assert {each.pid for each in workers} == {each.pid for each in proxy.processes()}
        decode.interval_s = 0.05
        async with proxy.streaming() as stream:
            proxy.supervisor.kill()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n"), "what runs may finish"
        await until(lambda: not any(map(runs, workers)))


async def test_workers_that_do_not_live_end_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
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
