# SPDX-License-Identifier: Apache-2.0
"""Conversations: each turn computes and moves what is new, and every answer is that of one agent.

References are answers of an agent alone, whose prefix cache is off. With prefix hits the one excuse is a tie
(I4); the judge of the chaos runs knows what that is.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster, Process
from kvferry.transfer.ids import new_transfer_id
from tests.chaos.judge import Verdict, judge
from tests.chaos.victims import processes, stopped
from tests.helpers.client import complete, session
from tests.helpers.metrics import scrape, settled, total, wait_idle
from tests.helpers.waiting import patient
from tests.standins import faults
from tests.system.conftest import StartAgent, StartCluster
from tests.system.conversation import (
    ANSWER_TOKENS,
    FIRST_TOKENS,
    QUESTION_TOKENS,
    TURNS,
    Conversation,
    Turn,
    counters_of,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

BLOCK = 16
BLOCK_BYTES = 65536
"""KV of one block of the bundled model."""
NEW_TOKENS = ANSWER_TOKENS + QUESTION_TOKENS
MIN_TOKENS = 32
POOL_BLOCKS = 96
LEASE_S = 1.0
CACHED = ("--prefix-cache", "true")
PULLING = ("--prefix-pull-min-tokens", str(MIN_TOKENS))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(start_agent: StartAgent) -> AsyncIterator[Process]:
    """The agent that references come from."""
    async with start_agent() as agent:
        yield agent


async def assert_right(http: aiohttp.ClientSession, alone: Process, turn: Turn, **fields: Any) -> None:
    reference = await complete(http, alone.url, Conversation.body(turn.prompt, **fields))
    verdict = judge(turn.answer, reference)
    assert verdict in (Verdict.RIGHT, Verdict.TIE), (turn.answer, reference)


async def idle(agents: list[Process]) -> None:
    for agent in agents:
        left = await wait_idle(agent.url, timeout_s=patient(15))
        assert left["used"] == left["leased"] == left["quarantined"] == 0, (agent.url, left)
        assert not total(await scrape(agent.url), "kvferry_agent_integrity_errors_total")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["tcp", pytest.param("nixl", marks=pytest.mark.full)]
)
async def cluster(request: pytest.FixtureRequest, start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    """Two prefill agents and a decode agent that lends to them."""
    async with start_cluster(
        prefill=2,
        args=(*CACHED, "--transfer", request.param),
        proxy_args=(*PULLING, "--stream-pull-min-tokens", "400"),
    ) as started:
        yield started


async def test_a_turn_computes_and_moves_what_is_new(cluster: Cluster, alone: Process) -> None:
    """Two prefill agents in turn, so that each lacks its own last answer and a whole turn of the other.

    Turns differ in how they go: streamed or not, one choice or two, and some of them are pulled while they
    are computed, hence asked for before their prefill has what it borrows.
    """
    async with session() as http:
        conversation = Conversation(cluster, http)
        for number in range(TURNS):
            fields = {"n": 1 + number % 2, "stream": number % 4 > 1}
            turn = await conversation.ask(**fields)
            await assert_right(http, alone, turn, **fields)
        first, *later = conversation.turns
        assert first.prefill["computed"] == first.decode["pulled"] == FIRST_TOKENS
        for before, turn in zip(conversation.turns, later, strict=False):
            print(len(turn.prompt), dict(turn.prefill), dict(turn.decode))
            # The last token of an answer has no KV yet, and only whole blocks are shared.
            known = (len(before.prompt) + ANSWER_TOKENS - 1) // BLOCK * BLOCK
            assert turn.decode["cached"] == known
            assert turn.decode["pulled"] == turn.prefill["computed"] == len(turn.prompt) - known
            assert turn.prefill["cached"] + turn.prefill["pulled_prefix"] == known
            assert turn.prefill["pulled_prefix"] <= 2 * NEW_TOKENS + FIRST_TOKENS
            assert turn.decode["pulled_bytes"] == -(-turn.decode["pulled"] // BLOCK) * BLOCK_BYTES
            assert turn.prefill["prefix_bytes"] == turn.prefill["pulled_prefix"] // BLOCK * BLOCK_BYTES
            assert not turn.decode["computed"], "no answer was computed twice"
        assert all(turn.prefill["pulled_prefix"] for turn in later)
        await idle(list(cluster.agents.values()))


async def source_params(http: aiohttp.ClientSession, cluster: Cluster, agent: Process) -> dict[str, Any]:
    """Where an agent lends from."""
    async with http.get(f"{cluster.url}/nodes") as response:
        nodes = {node["address"]: node for node in (await response.json())["nodes"]}
    control = urlsplit(nodes[agent.url]["control"])
    return {
        "remote_engine_id": nodes[agent.url]["incarnation"],
        "remote_host": control.hostname,
        "remote_port": control.port,
        "remote_tp_size": 1,
        "min_tokens": 1,
    }


async def prefill_leg(
    http: aiohttp.ClientSession, agent: Process, source: dict[str, Any] | None, body: dict[str, Any]
) -> Counter[str]:
    """Send a prefill leg that may borrow, and drop it; returns what it added to the counters."""
    before = counters_of(await scrape(agent.url))
    params = {"do_remote_decode": True, "transfer_id": new_transfer_id(), "client_max_tokens": 8}
    leg = {**body, "max_tokens": 1, "kv_transfer_params": {**params, "prefix_source": source}}
    async with http.post(f"{agent.url}/v1/completions", json=leg) as response:
        assert response.status == 200, await response.text()
        kept = (await response.json())["kv_transfer_params"]
    dropped = {"transfer_id": kept["transfer_id"], "incarnation": kept["remote_engine_id"]}
    async with http.post(f"{agent.url}/kv/drop", json=dropped) as response:
        assert response.status == 200
    async with asyncio.timeout(patient(10)):
        while True:
            added = counters_of(await scrape(agent.url))
            added.subtract(before)
            if sum(added[each] for each in ("computed", "cached", "pulled_prefix")) >= len(body["prompt"]):
                return added
            await asyncio.sleep(0.05)


async def test_nothing_is_borrowed_of_another_salt_or_other_ids(cluster: Cluster) -> None:
    """Whatever a hint says. (Other weights and layouts: `tests/unit/transfer/test_prefix_pull.py`.)"""
    async with session() as http:
        prefill, decode = cluster.agents["prefill-0"], cluster.agents["decode-0"]
        prompt = [7 + index % 150 for index in range(200)]
        body = Conversation.body(prompt, cache_salt="mine", max_tokens=2)
        await complete(http, decode.url, body)
        source = await source_params(http, cluster, decode)
        loans = "kvferry_transfer_prefix_loans_total"
        before = total(await scrape(decode.url), loans)
        for salt in (None, "theirs"):
            added = await prefill_leg(http, prefill, source, {**body, "cache_salt": salt})
            assert (added["pulled_prefix"], added["computed"]) == (0, 200)
        added = await prefill_leg(http, prefill, source, {**body, "prompt": [9, *prompt[1:]]})
        assert (added["pulled_prefix"], added["computed"]) == (0, 200)
        added = await prefill_leg(http, prefill, source, body)
        assert (added["pulled_prefix"], added["computed"]) == (192, 8)
        assert total(await settled(decode.url, loans, int(before) + 1), loans) == before + 1
        await idle([prefill, decode])


@pytest.mark.full
async def test_a_source_that_dies_while_it_is_read_costs_no_answer(
    start_cluster: StartCluster, alone: Process
) -> None:
    """I1, I5: the prompt is computed, and the other decode agent goes on."""
    async with (
        start_cluster(
            prefill=2,
            decode=2,
            args=CACHED,
            module=faults.AGENT,
            decode_args=("--transfer", "tcp", "--tcp-fault", "stall:after=1000"),
            proxy_args=PULLING,
        ) as cluster,
        session() as http,
    ):
        conversation = Conversation(cluster, http)
        first = await conversation.ask()
        (source,) = [
            agent
            for name, agent in cluster.agents.items()
            if name.startswith("decode") and counters_of(await scrape(agent.url))["pulled"]
        ]
        asking = asyncio.ensure_future(complete(http, cluster.url, Conversation.body(conversation.prompt)))
        prefills = [agent for name, agent in cluster.agents.items() if name.startswith("prefill")]
        async with asyncio.timeout(patient(20)):
            while not any(
                [total(await scrape(each.url), "kvferry_agent_num_requests_waiting") for each in prefills]
            ):
                await asyncio.sleep(0.005)
                assert not asking.done(), "it did not borrow"
        os.kill(source.pid, signal.SIGKILL)
        async with asyncio.timeout(patient(60)):
            turn = Turn(conversation.prompt, await asking)
        await assert_right(http, alone, turn)
        assert first.prefill["computed"] == FIRST_TOKENS
        failures = sum(
            [
                total(await scrape(each.url), "kvferry_transfer_prefix_pull_failures_total")
                for each in prefills
            ]
        )
        assert failures == 1
        await idle(prefills)


async def test_a_source_whose_blocks_are_reused_while_they_are_read(
    start_cluster: StartCluster, alone: Process
) -> None:
    """I1, I2: the reader's rank stands still, the loans run out, and the blocks get other contents.

    The reads succeed all the same, and only the source's last word tells that they are worth nothing. (A slow
    machine may pass the deadline of the borrowing meanwhile.)
    """
    num_conversations = 5
    async with (
        start_cluster(
            args=(*CACHED, "--lease-s", str(LEASE_S)),
            module=faults.AGENT,
            prefill_args=("--control-fault", "drop=1,only=renew"),
            decode_args=("--kv-blocks", str(POOL_BLOCKS)),
            proxy_args=PULLING,
        ) as cluster,
        session() as http,
    ):
        prefill, decode = cluster.agents["prefill-0"], cluster.agents["decode-0"]
        conversations = [
            Conversation(cluster, http, seed, first_tokens=96) for seed in range(num_conversations)
        ]
        meeting = Conversation(cluster, http, num_conversations, first_tokens=64)
        for conversation in (meeting, meeting, *conversations):  # the agents have met, in both directions
            await conversation.ask()
        with stopped(processes(prefill, "rank")):
            bodies = [Conversation.body(conversation.prompt) for conversation in conversations]
            asking = [asyncio.ensure_future(complete(http, cluster.url, body)) for body in bodies]
            async with asyncio.timeout(patient(20)):
                name = "kvferry_transfer_leases_ended_total"
                while total(await scrape(decode.url), name, cause="expired") < num_conversations:
                    await asyncio.sleep(0.02)
            filler = [5] * (POOL_BLOCKS * BLOCK - 1)
            await complete(http, decode.url, Conversation.body(filler, max_tokens=1))
        answers = await asyncio.gather(*asking)
        for conversation, answer in zip(conversations, answers, strict=True):
            await assert_right(http, alone, Turn(conversation.prompt, answer))
        await idle([prefill, decode])
        samples = await scrape(prefill.url)
        name = "kvferry_transfer_prefix_pull_failures_total"
        failures = Counter(
            {dict(labels)["reason"]: value for (key, labels), value in samples.items() if key == name}
        )
        assert failures.total() == num_conversations, failures
        assert set(+failures) <= {"invalid", "deadline"}, failures
        print(failures)
