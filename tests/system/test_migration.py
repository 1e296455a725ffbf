# SPDX-License-Identifier: Apache-2.0
"""A decode agent dies in mid-stream: every one of its streams goes on elsewhere, and no client can tell."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from kvferry.deploy.launcher import Process
from tests.helpers.client import Answer, complete_all, heldout
from tests.helpers.metrics import PAGE_AGE_S, scrape, total, wait_idle, wait_one_running
from tests.helpers.waiting import patient
from tests.system.conftest import StartCluster

STREAMS = 12
# Long enough that the agent's counters, a second old at most, still show streams in their midst.
TOKENS = 360
RUNNING_BEFORE = 4
MIN_MIGRATIONS = 3
LEASE_S = 2.0


def bodies() -> list[dict[str, Any]]:
    """Streams of every kind: greedy and sampled, one choice and two, penalties, logprobs, text held back.

    Those of two choices stand at an odd and at an even place, so that agents in turn get as many of them.
    """
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "n": 2},
        {"temperature": 1.5, "logprobs": 2},
        {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        # Without ids nothing is sent while text is held back; the second choice ends long before the first.
        {"temperature": 2.0, "n": 2, "stop": ["77", "a="], "min_tokens": 40, "return_token_ids": False},
        {"temperature": 2.0, "stop": ["1234567890"], "return_token_ids": False},
    ]
    return [
        {
            "model": "ferry-tiny",
            "prompt": prompt.prompt,
            "seed": 50 + index,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            **kinds[index % len(kinds)],
        }
        for index, prompt in enumerate(heldout(STREAMS))
    ]


def kill_api(agent: Process) -> None:
    """The connections break."""
    os.kill(agent.pid, signal.SIGKILL)


def kill_rank(agent: Process) -> None:
    """The agent still says in its streams that its engine has died."""
    family = psutil.Process(agent.pid).children(recursive=True)
    next(member for member in family if "kvferry.agent.worker.process" in member.cmdline()).kill()


@pytest.mark.timeout(patient(240))  # two runs, and five processes to start on two cores
@pytest.mark.parametrize(
    ("prefill", "kill", "workers"),
    [
        pytest.param(1, kill_rank, 2, id="1P2D-rank-2workers"),
        # `test_death.py` kills an API process as well, though without comparing every answer.
        pytest.param(1, kill_api, 1, id="1P2D-api", marks=pytest.mark.full),
        pytest.param(2, kill_rank, 2, id="2P2D-rank-2workers", marks=pytest.mark.full),
    ],
)
async def test_streams_survive_the_death_of_their_decode_agent(
    start_cluster: StartCluster, prefill: int, kill: Any, workers: int
) -> None:
    """I4: tokens, text, logprobs, finish_reason and usage are those of the undisturbed run.

    Also where several processes of the proxy serve the streams.
    """
    args = ("--lease-s", str(LEASE_S), "--max-model-len", "1536")
    proxy_args = ("--workers", str(workers))
    async with start_cluster(prefill=prefill, decode=2, args=args, proxy_args=proxy_args) as cluster:
        undisturbed = await complete_all(cluster.url, bodies(), concurrency=STREAMS)
        running = asyncio.ensure_future(complete_all(cluster.url, bodies(), concurrency=STREAMS))
        name_of_doomed = await wait_one_running(cluster.agents, RUNNING_BEFORE)
        doomed = cluster.agents[name_of_doomed]
        kill(doomed)
        await doomed.process.wait()
        results = await running
        migrations = total(await scrape(cluster.url), "kvferry_proxy_migrations_total")
        for name, agent in cluster.agents.items():
            if name != name_of_doomed:
                left = await wait_idle(agent.url, timeout_s=LEASE_S + 1 + PAGE_AGE_S)
                assert left["leased"] == left["used"] == left["quarantined"] == 0, (name, left)
    assert migrations >= MIN_MIGRATIONS
    for body, ours, theirs in zip(bodies(), results, undisturbed, strict=True):
        assert isinstance(theirs, Answer), theirs
        assert isinstance(ours, Answer), (body, ours)
        assert ours.same() == theirs.same(), body
