# SPDX-License-Identifier: Apache-2.0
"""Streamed pull with real agents: KV moves while the prompt is computed, and every answer stays the same.

What is asserted about time is its order only. References are answers of the decode agent, asked directly.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import Answer, Prompt, complete, complete_all, heldout, session
from tests.helpers.metrics import STATS_S, scrape, settled, total, wait_idle, wait_running
from tests.system.conftest import StartCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHUNK = 128
BLOCK = 16
TRIES = 10
EOS_ID = 935
LONGEST = sorted(heldout(), key=lambda prompt: -prompt.prompt_tokens)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster(
        prefill=2,
        args=("--prefill-chunk", str(CHUNK), "--lease-s", "30"),
        proxy_args=("--stream-pull-min-tokens", "100"),
    ) as cluster:
        yield cluster


def body(prompt: Prompt, **fields: Any) -> dict[str, Any]:
    return {"model": "ferry-tiny", "prompt": prompt.prompt, "seed": 3, "max_tokens": 8, **fields}


def answers(results: list[Any]) -> list[tuple[object, ...]]:
    assert all(isinstance(result, Answer) for result in results), results
    return [result.same() for result in results]


async def idle(cluster: Cluster, names: tuple[str, ...]) -> None:
    """Nothing is left anywhere, long before any lease would end."""
    for name in names:
        left = await wait_idle(cluster.agents[name].url, timeout_s=10)
        assert left["used"] == left["leased"] == left["quarantined"] == 0, (name, left)


async def test_when_the_prefill_ends_its_last_chunk_is_left_to_pull_at_most(cluster: Cluster) -> None:
    """A busy machine may miss that once, but not always; and never is a block read before its time."""
    prompt = LONGEST[0]
    before_last = (prompt.prompt_tokens - 1) // CHUNK * CHUNK // BLOCK
    num_blocks = -(-prompt.prompt_tokens // BLOCK)
    assert 0 < before_last < num_blocks
    early: list[Any] = []
    async with session() as http:
        theirs = await complete(http, cluster.agents["decode-0"].url, body(prompt))
        while max(early, default=0) < before_last and len(early) < TRIES:
            ours = await complete(http, cluster.url, body(prompt, stream=True))
            assert ours.same() == theirs.same()
            assert ours.timing["pull_bytes"] and not ours.timing["recomputed"]
            early.append(ours.timing["pull_early_blocks"])
    print(f"of {num_blocks} blocks {early} were here when the prefill ended")
    assert max(early) in (before_last, num_blocks)
    name = "kvferry_transfer_streamed_pulls_total"
    assert total(await settled(cluster.agents["decode-0"].url, name, 1), name) >= 1
    assert total(await scrape(cluster.url), "kvferry_proxy_streamed_pulls_total") == len(early)


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_are_those_of_one_agent(cluster: Cluster, stream: bool) -> None:
    """I4: several at once, with choices that end at different tokens, and with short prompts in between."""
    bodies = [
        body(prompt, n=n, logprobs=1, temperature=temperature, max_tokens=max_tokens, stream=stream)
        for prompt, n, temperature, max_tokens in (
            (LONGEST[1], 1, 0.0, 8),
            (LONGEST[2], 4, 1.5, 8),
            (LONGEST[3], 3, 1.0, 2),
            (LONGEST[-1], 2, 1.0, 8),
            (LONGEST[4], 1, 0.0, 1),
        )
    ]
    theirs = await complete_all(cluster.agents["decode-0"].url, bodies, concurrency=5)
    ours = await complete_all(cluster.url, bodies, concurrency=5)
    assert answers(ours) == answers(theirs)
    await idle(cluster, tuple(cluster.agents))


async def test_a_client_that_leaves_while_both_legs_run_frees_everything(cluster: Cluster) -> None:
    decode = cluster.agents["decode-0"]
    bodies = [body(LONGEST[5], stream=True)]
    asking = asyncio.ensure_future(complete_all(cluster.url, bodies, concurrency=1))
    async with asyncio.timeout(20):
        while not total(await scrape(decode.url), "kvferry_agent_num_requests_waiting"):  # it pulls
            await asyncio.sleep(0.005)
            assert not asking.done(), "too fast for this test"
    asking.cancel()
    await asyncio.wait([asking])
    await idle(cluster, tuple(cluster.agents))


async def test_a_prompt_that_ends_with_its_first_token_fails_no_pull(cluster: Cluster) -> None:
    """What the decode agent has pulled by then is of no use. Nothing failed or is computed twice."""
    decode = cluster.agents["decode-0"].url
    names = ("kvferry_transfer_failures_total", "kvferry_agent_recomputes_total")
    before, withdrawn = await scrape(decode), await num_withdrawn(cluster)
    ended = {"logit_bias": {str(EOS_ID): 100}}
    bodies = [body(prompt, n=2, stream=bool(i % 2), **ended) for i, prompt in enumerate(LONGEST[14:34])]
    replies = await complete_all(cluster.url, bodies, concurrency=2)
    assert all(isinstance(reply, Answer) for reply in replies), replies
    await idle(cluster, tuple(cluster.agents))
    async with asyncio.timeout(STATS_S):
        while await num_withdrawn(cluster) < withdrawn + len(bodies):
            await asyncio.sleep(0.1)
    after = await scrape(decode)
    assert [total(after, name) for name in names] == [total(before, name) for name in names]


async def num_withdrawn(cluster: Cluster) -> float:
    """Leases that both prefill agents have withdrawn, as of a second ago at most."""
    name = "kvferry_transfer_leases_ended_total"
    pages = [await scrape(cluster.agents[f"prefill-{i}"].url) for i in range(2)]
    return sum(total(page, name, cause="withdrawn") for page in pages)


async def test_prefill_agents_that_die_in_the_midst_change_no_answer(cluster: Cluster) -> None:
    """I1, I2, I4, I5: what was pulled by then is thrown away, and the request goes to the other one."""
    bodies = [body(prompt, n=2, stream=bool(index % 2)) for index, prompt in enumerate(LONGEST[6:14])]
    theirs = await complete_all(cluster.agents["decode-0"].url, bodies, concurrency=8)
    doomed = cluster.agents["prefill-0"]
    asking = asyncio.ensure_future(complete_all(cluster.url, bodies, concurrency=8))
    await wait_running(doomed.url)
    os.kill(doomed.pid, signal.SIGKILL)
    assert answers(await asking) == answers(theirs)
    assert total(await scrape(cluster.url), "kvferry_proxy_retries_total", leg="prefill") >= 1
    await idle(cluster, ("prefill-1", "decode-0"))
