# SPDX-License-Identifier: Apache-2.0
"""Agents come and go while requests run."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import aiohttp
import pytest

from tests.standins.agents import StandInAgent
from tests.unit.proxy.conftest import Stage, Streamed

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 6}


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_request_sees_a_500_while_agents_join_leave_and_restart(stage: Stage, seed: int) -> None:
    """R21, X2, X8: registrations change under traffic; every answer is whole or a typed refusal."""
    await stage.pair(interval_s=0.002)
    rng = random.Random(seed)
    outcomes = Counter[str]()
    stop = asyncio.Event()

    async def come_and_go() -> None:
        for _ in range(12):
            role = rng.choice(["prefill", "decode", "both"])
            agent = StandInAgent(role, (stage.discovery,), interval_s=0.002, ping_interval_s=0.05)
            async with agent:
                await agent.until(lambda agent=agent: agent.acks)
                await asyncio.sleep(rng.uniform(0, 0.1))
                if rng.random() < 0.5:
                    agent.overrides["state"] = "draining"
                    await agent.until(lambda agent=agent, acks=agent.acks: agent.acks > acks + 1)
        stop.set()

    async def ask(stream: bool) -> None:
        while not stop.is_set():
            async with stage.post({**BODY, "stream": stream}) as response:
                raw = await response.read()
            if stream and response.status == 200:
                error = Streamed(response.status, response.headers, raw).error
                outcomes["streamed" if error is None else str(error["code"])] += 1
            else:
                outcomes[str(response.status)] += 1

    async with asyncio.TaskGroup() as tasks:
        for index in range(12):
            tasks.create_task(ask(stream=index % 2 == 0))
        tasks.create_task(come_and_go())
    assert outcomes["200"] > 20 and outcomes["streamed"] > 20
    # An agent that is cut off in mid-answer costs its own requests, and those end typed.
    typed = {"502", "503", "stream_broken", "agent_lost", "no_agent"}
    assert set(outcomes) <= {"200", "streamed", *typed}, outcomes


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
