# SPDX-License-Identifier: Apache-2.0
"""The pool of connections to agents when it has fewer places than there are legs."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.errors import AgentLost
from kvferry.proxy.http.pool import UpstreamPool
from tests.standins.agents import Fault, StandInAgent

BODY = json.dumps({"model": "stand-in", "prompt": "a b c", "max_tokens": 3}).encode()
SOON_S = 5.0
"""Less than an unused connection is kept."""


async def ask(upstream: UpstreamPool, agent: StandInAgent) -> None:
    by = asyncio.get_running_loop().time() + SOON_S
    async with upstream.post(
        agent.registration(), "/v1/completions", BODY, {}, headers_by=by, by=by
    ) as answer:
        await answer.body()


async def test_a_leg_that_waits_gets_the_connection_of_one_that_ends() -> None:
    config = ProxyConfig(max_connections=2)
    async with UpstreamPool(config) as upstream, StandInAgent("both") as agent:
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(ask(upstream, agent) for _ in range(8)))
        assert agent.peak <= 2
        assert len({asked.connection for asked in agent.asked}) == 2


async def test_a_leg_that_waits_gets_the_place_of_one_at_another_agent() -> None:
    config = ProxyConfig(max_connections=1)
    async with UpstreamPool(config) as upstream, StandInAgent("both") as one, StandInAgent("both") as other:
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(ask(upstream, agent) for agent in (one, other, one, other)))
        assert len(one.asked) == len(other.asked) == 2


async def test_a_leg_that_fails_gives_its_place_up() -> None:
    config = ProxyConfig(max_connections=1)
    async with UpstreamPool(config) as upstream, StandInAgent("both") as agent, StandInAgent("both") as gone:
        await gone.close_http()
        agent.faults += [Fault("alone", "reset"), Fault("alone", "status")]
        for failing in (gone, agent, agent):
            with pytest.raises(AgentLost):
                await ask(upstream, failing)
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(ask(upstream, agent) for _ in range(2)))
