# SPDX-License-Identifier: Apache-2.0
"""Killed processes: nothing leaks, nothing hangs, every failure is typed, and the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import Answer, complete, complete_all, heldout, session
from tests.helpers.deaths import assert_within, exit_s
from tests.helpers.metrics import PAGE_AGE_S, scrape, total, wait_idle, wait_one_running
from tests.system.conftest import StartAgent, StartCluster

LEASE_S = 2.0
STREAMS = 32
MAX_DEATH_S = 1.0


def long_body(prompt: str, index: int) -> dict[str, Any]:
    return {
        "model": "ferry-tiny",
        "prompt": prompt,
        "seed": index,
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }


@pytest.mark.timeout(120)  # a cluster of four to start, a lease to end: 45 s on two slow cores
async def test_killing_a_decode_agent_in_the_midst_of_32_streams(start_cluster: StartCluster) -> None:
    """Its streams go on at the other agent; the prefill agent holds nothing after lease + 1 s."""
    bodies = [long_body(prompt.prompt, index) for index, prompt in enumerate(heldout(STREAMS))]
    async with start_cluster(
        decode=2, args=("--lease-s", str(LEASE_S), "--max-model-len", "1536")
    ) as cluster:
        running = asyncio.ensure_future(complete_all(cluster.url, bodies, concurrency=STREAMS))
        doomed = cluster.agents[await wait_one_running(cluster.agents, 8)]
        os.kill(doomed.pid, signal.SIGKILL)
        await doomed.process.wait()
        results = await running
        left = await wait_idle(cluster.agents["prefill-0"].url, timeout_s=LEASE_S + 1 + PAGE_AGE_S)
        assert left["leased"] == left["used"] == left["quarantined"] == 0
        answered = [result for result in results if isinstance(result, Answer)]
        assert len(answered) == STREAMS, [result for result in results if result not in answered]
        assert all(answer.completion_tokens == 400 for answer in answered)
        assert all(len(answer.choices[0].token_ids) == 400 for answer in answered)
        assert total(await scrape(cluster.url), "kvferry_proxy_migrations_total") >= 1
        (other,) = (each for name, each in cluster.agents.items() if name[0] == "d" and each is not doomed)
        again = await complete_all(cluster.url, bodies[:4], concurrency=4)
        assert all(isinstance(result, Answer) for result in again)
        assert (await wait_idle(other.url, timeout_s=10))["used"] == 0


# The engine dies of its rank's death, so the one shows the other too.
@pytest.mark.parametrize(
    "victim",
    ["kvferry.agent.worker.process", pytest.param("kvferry.agent.engine.process", marks=pytest.mark.full)],
)
async def test_killing_any_process_of_an_agent_ends_all_of_it(start_agent: StartAgent, victim: str) -> None:
    """I8: within a second of the death of the engine or of a rank, nothing of the agent is left."""

    async def death_s() -> float:
        async with start_agent("--tp", "2") as agent:
            family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
            assert len(family) == 4
            handles = [os.pidfd_open(member.pid) for member in family]
            next(member for member in family if victim in member.cmdline()).kill()
            took = await exit_s(handles)
            assert await agent.process.wait() != 0
            return took

    await assert_within(death_s, MAX_DEATH_S)


async def test_killing_the_api_process_ends_engine_and_ranks(start_agent: StartAgent) -> None:
    """I8, the other way round: no engine renews leases for an API that is gone."""

    async def death_s() -> float:
        async with start_agent("--tp", "2") as agent:
            family = psutil.Process(agent.pid).children(recursive=True)
            handles = [os.pidfd_open(member.pid) for member in family]
            os.kill(agent.pid, signal.SIGKILL)
            return await exit_s(handles)

    await assert_within(death_s, MAX_DEATH_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster(
        prefill=2, decode=2, args=("--lease-s", "30", "--max-model-len", "1536")
    ) as cluster:
        yield cluster


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_frees_everything(cluster: Cluster) -> None:
    """A disconnect reaches both agents: all blocks are free long before the lease would end."""
    async with session() as http:
        tasks = [
            asyncio.ensure_future(complete(http, cluster.url, long_body(prompt.prompt, index)))
            for index, prompt in enumerate(heldout(16))
        ]
        async with asyncio.timeout(30):
            while (
                total(await scrape(cluster.agents["decode-0"].url), "kvferry_agent_num_requests_running") < 4
            ):
                await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for agent in cluster.agents.values():
        left = await wait_idle(agent.url, timeout_s=10)
        assert left["leased"] == left["used"] == left["quarantined"] == 0, (agent.name, left)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_dead_agent_is_replaced_before_the_first_event(cluster: Cluster) -> None:
    """Requests sent at the moment an agent dies are retried on another pair; none fails."""
    prompts = heldout(24)
    bodies = [
        {"model": "ferry-tiny", "prompt": prompt.prompt, "temperature": 0, "max_tokens": 16}
        for prompt in prompts
    ]
    await complete_all(cluster.url, bodies[:4], concurrency=4)
    for name in ("prefill-0", "decode-0"):
        victim = cluster.agents[name]
        os.kill(victim.pid, signal.SIGKILL)
        results = await complete_all(cluster.url, bodies, concurrency=8)
        failed = [result for result in results if not isinstance(result, Answer)]
        assert not failed, failed[:3]
        for prompt, answer in zip(prompts, results, strict=True):
            assert isinstance(answer, Answer) and answer.choices[0].text == prompt.answer
