# SPDX-License-Identifier: Apache-2.0
"""Agents come and go while requests run."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import pytest

from kvferry.proxy.wire.registration import Register
from tests.standins.agents import StandInAgent
from tests.unit.proxy.conftest import Stage, StartStage, Streamed
from tests.unit.proxy.workers.test_workers import Workers, running

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 6}


DEAD_AFTER_S = 4.0
"""No request is routed to an agent that has been dead for longer."""
TYPED = {"429", "502", "503", "504", "stream_broken", "agent_lost", "no_agent", "agent_timeout", "overloaded"}
"""How a request may fail whose agent was cut off: an HTTP status, or the code of an error event."""


class Proxy(Protocol):
    """What a hammer needs of a proxy."""

    @property
    def discovery(self) -> str: ...
    def post(self, body: Any) -> Any: ...


@dataclass(slots=True)
class Hammer:
    """A fleet that changes while clients ask, and what they got."""

    stage: Proxy
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    died_at: dict[str, float] = field(default_factory=dict)
    """When each address was left, unless somebody is there again."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def come_and_go(self, times: int) -> None:
        """Agents join one by one, and leave, some after a drain; some come back at the same address."""
        port = 0
        for _ in range(times):
            role = self.rng.choice(["prefill", "decode", "both"])
            agent = StandInAgent(
                role, (self.stage.discovery,), interval_s=0.002, ping_interval_s=0.05, port=port
            )
            async with agent:
                self.died_at.pop(agent.address, None)
                await agent.until(lambda agent=agent: agent.acks, timeout_s=30)
                await asyncio.sleep(self.rng.uniform(0, 0.1))
                if self.rng.random() < 0.4:
                    agent.overrides["state"] = "draining"
                    await agent.until(
                        lambda agent=agent, acks=agent.acks: agent.acks > acks + 1, timeout_s=30
                    )
            self.died_at[agent.address] = asyncio.get_running_loop().time()
            port = agent.port if self.rng.random() < 0.3 else 0

    async def ask(self, stream: bool) -> None:
        """One client, who asks until the hammer stops."""
        while not self.stopped.is_set():
            async with self.stage.post({**BODY, "stream": stream}) as response:
                raw = await response.read()
            if stream and response.status == 200:
                error = Streamed(response.status, response.headers, raw).error
                self.outcomes["streamed" if error is None else str(error["code"])] += 1
            else:
                self.outcomes[str(response.status)] += 1

    def watch_routes(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Notes every leg that is sent to an agent which has been dead for too long."""
        late: list[str] = []
        post = stage.proxy.services.upstream.post

        def noted(agent: Register, path: str, *args: Any, **kwargs: Any) -> Any:
            died_at = self.died_at.get(agent.address)
            if died_at is not None and path.startswith("/v1/"):
                since = asyncio.get_running_loop().time() - died_at
                if since > DEAD_AFTER_S:
                    late.append(f"{agent.role} at {agent.address}, dead for {since:.1f} s")
            return post(agent, path, *args, **kwargs)

        monkeypatch.setattr(stage.proxy.services.upstream, "post", noted)
        return late


async def hammer(stage: Stage, monkeypatch: pytest.MonkeyPatch, seed: int, times: int, clients: int) -> None:
    """R21, X2, X8: registrations change under traffic; every answer is whole or a typed refusal."""
    await stage.pair(interval_s=0.002)
    run = Hammer(stage, random.Random(seed))
    late = run.watch_routes(stage, monkeypatch)
    await check(run, times, clients)
    assert not late


async def check(run: Hammer, times: int, clients: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for index in range(clients):
            tasks.create_task(run.ask(stream=index % 2 == 0))
        await run.come_and_go(times)
        run.stopped.set()
    assert run.outcomes["200"] > 20 and run.outcomes["streamed"] > 20
    # An agent that is cut off in mid-answer costs its own requests, and those end typed.
    assert set(run.outcomes) <= {"200", "streamed", *TYPED}, run.outcomes


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_request_sees_a_500_while_agents_join_leave_and_restart(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """R21, X2, X8: the long form's rules, for a moment."""
    await hammer(stage, monkeypatch, seed, times=12, clients=12)


@dataclass(slots=True)
class SeveralWorkers:
    """A proxy of several processes. Every request has its own connection, so the kernel picks a worker."""

    workers: Workers
    http: aiohttp.ClientSession

    @property
    def discovery(self) -> str:
        return self.workers.discovery

    def post(self, body: Any) -> Any:
        return self.http.post(f"{self.workers.url}/v1/completions", json=body)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("count", [2, 4])
async def test_nor_with_several_workers(count: int) -> None:
    """They learn of every change by the supervisor."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with running(count) as workers, aiohttp.ClientSession(connector=connector) as http:
        for role in ("prefill", "decode"):
            await workers.agent(role, interval_s=0.002)
        await check(Hammer(SeveralWorkers(workers, http), random.Random(count)), times=12, clients=12)
        assert len(workers.processes()) == count, "none has died"


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_nor_when_200_come_and_go_under_64_streams(
    start_stage: StartStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await start_stage(total_timeout_s=60.0, first_byte_timeout_s=30.0)
    await hammer(stage, monkeypatch, seed=3, times=200, clients=64)


async def test_with_two_and_two_all_four_pairs_are_used_evenly(stage: Stage) -> None:
    """X8, over real sockets."""
    prefills = [await stage.agent("prefill") for _ in range(2)]
    decodes = [await stage.agent("decode") for _ in range(2)]
    for _ in range(8):
        await stage.ask(BODY)
    pairs = Counter(
        (source.incarnation, target.incarnation)
        for source in prefills
        for target in decodes
        for leg in target.asked
        if leg.body["kv_transfer_params"]["remote_engine_id"] == source.incarnation
    )
    assert sorted(pairs.values()) == [2, 2, 2, 2]


async def test_a_restarted_agent_is_used_again_at_its_old_address(stage: Stage) -> None:
    """X23: another incarnation at the same port, known within a ping."""
    await stage.agent("prefill")
    decode = StandInAgent("decode", (stage.discovery,))
    async with decode:
        await decode.until(lambda: decode.acks)
        assert (await stage.ask(BODY))[0] == 200
    again = StandInAgent("decode", (stage.discovery,), port=decode.port)
    async with again:
        await again.until(lambda: again.acks)
        assert (await stage.ask(BODY))[0] == 200
        assert len(again.asked) == 1
        async with aiohttp.ClientSession() as http, http.get(f"{stage.proxy.url}/nodes") as response:
            nodes = (await response.json())["nodes"]
    assert [node["incarnation"] for node in nodes if node["role"] == "decode"] == [again.incarnation]
