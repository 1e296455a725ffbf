# SPDX-License-Identifier: Apache-2.0
"""A reader that comes, or is still reading, after the lease has ended and the blocks hold something else.

A known engine answers HTTP 200 with wrong tokens here (docs/sources.md#vllm-nixl).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster, Process
from kvferry.transfer.ids import new_transfer_id
from tests.chaos.judge import Verdict, judge
from tests.chaos.victims import BACKENDS, library, processes, stopped
from tests.helpers.client import Answer, complete_all, heldout, session
from tests.helpers.metrics import settled, wait_idle
from tests.standins import faults
from tests.system.conftest import StartCluster

LEASE_S = 1.0
EXPIRY_S = 10.0
POOL_BLOCKS = 96
FILLER = [5] * (POOL_BLOCKS * 16 - 1)
"""A prompt that overwrites every block of the producer's pool."""
BATCH = 15
MAX_PROMPT_TOKENS = 96
"""So short that the pool holds a batch."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]
times = pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.full)])


def bodies(count: int) -> list[dict[str, Any]]:
    prompts = [prompt for prompt in heldout(task="recall") if prompt.prompt_tokens <= MAX_PROMPT_TOKENS]
    return [
        {
            "model": "ferry-tiny",
            "prompt": prompts[index % len(prompts)].prompt,
            "temperature": 1.0,
            "seed": index,
            "max_tokens": 8,
            "ignore_eos": True,
        }
        for index in range(count)
    ]


async def prefill(http: aiohttp.ClientSession, agent: Process, body: dict[str, Any]) -> dict[str, Any]:
    """The prefill leg alone; returns the body of its decode leg."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": new_transfer_id()}
    leg = {**body, "max_tokens": 1, "kv_transfer_params": {**wanted, "client_max_tokens": body["max_tokens"]}}
    async with http.post(f"{agent.url}/v1/completions", json=leg) as response:
        reply = await response.json()
        assert response.status == 200, reply
    return {**body, "kv_transfer_params": reply["kv_transfer_params"]}


async def overwrite(agent: Process) -> None:
    """Wait for the end of every lease, then write to every block of the pool."""
    assert not (await wait_idle(agent.url, EXPIRY_S))["leased"]
    (filled,) = await complete_all(
        agent.url, [{"model": "ferry-tiny", "prompt": FILLER, "max_tokens": 1}], concurrency=1
    )
    assert isinstance(filled, Answer), filled


async def ask_late(
    cluster: Cluster,
    count: int,
    decode: Callable[[list[dict[str, Any]]], Awaitable[list[Any]]],
) -> Counter[Verdict]:
    """Every prompt prefilled at the one agent and decoded by `decode`, in batches; all answers right."""
    asked = bodies(count)
    # The decode agent computes a request that comes without KV all by itself.
    references = await complete_all(
        cluster.agents["decode-0"].url, [{**body, "logprobs": 0} for body in asked], BATCH
    )
    verdicts: list[Verdict] = []
    async with session() as http:
        for first in range(0, count, BATCH):
            batch = asked[first : first + BATCH]
            legs = await asyncio.gather(*(prefill(http, cluster.agents["prefill-0"], body) for body in batch))
            results = await decode(legs)
            for result, reference in zip(results, references[first : first + BATCH], strict=True):
                assert isinstance(reference, Answer), reference
                verdicts.append(judge(result, reference))
                assert verdicts[-1] in (Verdict.RIGHT, Verdict.TIE, Verdict.FAILED), (result, reference)
    assert verdicts.count(Verdict.RIGHT) >= 0.95 * count
    return Counter(verdicts)


async def failures(cluster: Cluster, count: int = 0) -> Counter[str]:
    """Pulls that have failed so far, by reason; the metrics page is given time to have `count` of them."""
    samples = await settled(cluster.agents["decode-0"].url, "kvferry_transfer_failures_total", count)
    return Counter(
        {
            dict(labels)["reason"]: int(value)
            for (name, labels), value in samples.items()
            if name == "kvferry_transfer_failures_total"
        }
    )


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        name if name in ("tcp", "nixl") else pytest.param(name, marks=pytest.mark.full) for name in BACKENDS
    ],
)
async def cluster(request: pytest.FixtureRequest, start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    """A producer with a small pool, and a reader that never renews a lease."""
    with library(request.param):
        async with start_cluster(
            args=("--transfer", request.param, "--lease-s", str(LEASE_S)),
            prefill_args=("--kv-blocks", str(POOL_BLOCKS)),
            decode_args=("--control-fault", "drop=1,only=renew"),
            module=faults.AGENT,
        ) as running:
            yield running


@times
async def test_a_reader_that_comes_after_the_blocks_were_reused(count: int, cluster: Cluster) -> None:
    """I1, however often: the lease is gone, and the prompt is computed again."""

    async def decode(legs: list[dict[str, Any]]) -> list[Any]:
        await overwrite(cluster.agents["prefill-0"])
        return await complete_all(cluster.agents["decode-0"].url, legs, BATCH)

    before = await failures(cluster)
    verdicts = await ask_late(cluster, count, decode)
    new = await failures(cluster, before.total() + count) - before
    assert new == {"lease_expired": count}, (new, verdicts)


@times
async def test_a_reader_whose_blocks_are_reused_while_it_reads(count: int, cluster: Cluster) -> None:
    """I1: the reader's rank stands still between `open` and the read, so what it reads is something else.

    The read succeeds, and only the producer's last word tells that it is worth nothing.
    """
    await complete_all(cluster.url, bodies(1), concurrency=1)  # the agents have met
    rank = processes(cluster.agents["decode-0"], "rank")

    async def decode(legs: list[dict[str, Any]]) -> list[Any]:
        with stopped(rank):
            results = asyncio.ensure_future(complete_all(cluster.agents["decode-0"].url, legs, BATCH))
            await overwrite(cluster.agents["prefill-0"])
        return await results

    before = await failures(cluster)
    verdicts = await ask_late(cluster, count, decode)
    new = await failures(cluster, before.total() + count) - before
    # On a slow machine some come too late even to open.
    assert new.total() == count and new["invalid"] >= count / 2, (new, verdicts)
