# SPDX-License-Identifier: Apache-2.0
"""Four agents that can do both, under prompts that turn from long to short and back."""

from __future__ import annotations

import asyncio
import random
from statistics import mean
from typing import Any, NamedTuple

import aiohttp
import pytest

from kvferry.deploy.http_client import fetch_nodes
from tests.helpers.client import Answer, complete, complete_all, session
from tests.standins.paced_agent import MODULE, Pace
from tests.system.conftest import MODEL, StartAgent, StartCluster

PACE = Pace(step_s=0.06, token_s=0.0008, sequence_s=0.002)
PHASE_S = 10.0
"""Within which agents are to follow."""
CONCURRENCY = 16

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


class Phase(NamedTuple):
    """Tokens of prompts and of answers, and requests per second."""

    prompt: int
    answer: int
    rate: float


LONG, SHORT = Phase(900, 4, 2.0), Phase(30, 64, 4.0)


def body(phase: Phase, number: int) -> dict[str, Any]:
    ids = random.Random(number).choices(range(5, 900), k=phase.prompt)
    return {
        "model": MODEL,
        "prompt": ids,
        "max_tokens": phase.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def prompts_in_work(http: aiohttp.ClientSession, url: str) -> float:
    """Return what share of its work of the last 10 s or so were prompts, as a mean over the agents."""
    works = [node.work for node in (await fetch_nodes(http, url)).nodes if node.work is not None]
    assert len(works) == 4
    worked = [(each.prefill_share, each.prefill_share + each.decode_share) for each in works]
    return mean(prompts / work if work else 0.0 for prompts, work in worked)


async def test_agents_follow_a_mix_that_turns_and_answer_as_one_alone(
    start_cluster: StartCluster, start_agent: StartAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PACE.environment().items():
        monkeypatch.setenv(name, value)
    loop, noise = asyncio.get_running_loop(), random.Random(1)
    asked: list[dict[str, Any]] = []
    sent: list[asyncio.Task[Answer]] = []
    shares = []
    async with (
        start_cluster(prefill=0, decode=0, both=4, module=MODULE) as cluster,
        session() as http,
        asyncio.TaskGroup() as tasks,
    ):
        due = loop.time()
        for phase in (LONG, LONG, SHORT, LONG):
            end = due + PHASE_S
            while (due := due + noise.expovariate(phase.rate)) < end:
                await asyncio.sleep(max(0.0, due - loop.time()))
                asked.append(body(phase, len(asked)))
                sent.append(tasks.create_task(complete(http, cluster.url, asked[-1])))
            due = end
            await asyncio.sleep(max(0.0, end - loop.time()))
            shares.append(await prompts_in_work(http, cluster.url))
    print(shares)
    _, long, short, again = shares
    assert short < min(long, again), shares
    async with start_agent() as agent:
        alone = await complete_all(agent.url, asked, CONCURRENCY)
    for answer, expected in zip(sent, alone, strict=True):
        assert isinstance(expected, Answer)
        assert answer.result().same() == expected.same()
