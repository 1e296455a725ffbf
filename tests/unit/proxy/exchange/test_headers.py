# SPDX-License-Identifier: Apache-2.0
"""No header goes from one side of the proxy to the other but those that it knows and has looked at."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvferry.proxy.http.pool import PoolSettings, UpstreamPool
from tests.standins.agents import Fault, StandInAgent
from tests.unit.proxy.conftest import Stage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}
FROM_CLIENT = {
    "Authorization": "Bearer of-the-client",
    "Cookie": "session=of-the-client",
    "Forwarded": "for=of-the-client",
    "Origin": "http://of-the-client",
    "Proxy-Authorization": "Basic of-the-client",
    "Server-Timing": "of-the-client;dur=1",
    "X-Api-Key": "of-the-client",
    "X-Forwarded-For": "of-the-client",
    "X-Kvferry-Answer-Id": "of-the-client",
    "X-Session-Id": "of-the-client",
    "traceparent": "of-the-client",
}
FROM_AGENT = {
    "Access-Control-Allow-Origin": "of-the-agent",
    "Location": "http://of-the-agent",
    "Set-Cookie": "session=of-the-agent",
    "X-Request-Id": "of-the-agent",
    "X-Whatever": "of-the-agent",
}
TO_AGENT = {
    "accept", "accept-encoding", "content-length", "content-type", "host", "user-agent",
    "x-kvferry-answer-id", "x-kvferry-created", "x-request-id",
}  # fmt: skip


@pytest.mark.parametrize(
    "body", [BODY, {**BODY, "stream": True}, {**BODY, "model": "unheard-of"}, {"n": "x"}]
)
async def test_headers_are_neither_reflected_nor_passed_on(stage: Stage, body: dict[str, object]) -> None:
    """No reflected headers."""
    pair = await stage.pair(answer_headers=FROM_AGENT)
    async with stage.post(body, headers=FROM_CLIENT) as response:
        shown = str(response.headers)
        await response.read()
    assert "of-the-client" not in shown and "of-the-agent" not in shown
    for agent in pair:
        for asked in agent.asked:
            assert {name.lower() for name in asked.headers} <= TO_AGENT
            assert "of-the-client" not in str(asked.headers)


async def test_an_agents_refusal_brings_no_headers_either(stage: Stage) -> None:
    await stage.pair(answer_headers=FROM_AGENT, faults=[Fault("prefill", "status", status=422)])
    async with stage.post(BODY) as response:
        assert response.status == 422
        assert "of-the-agent" not in str(response.headers)


async def test_the_clusters_token_goes_to_holders_of_the_key_alone() -> None:
    """A server of another engine could use it on the agents."""
    async with (
        UpstreamPool(PoolSettings(bearer="of-the-cluster")) as upstream,
        StandInAgent("both") as native,
        StandInAgent("both", overrides={"dialect": "vllm-nixl"}) as other,
    ):
        by = asyncio.get_running_loop().time() + 10
        for agent in (native, other):
            info, body = agent.registration(), json.dumps(BODY).encode()
            async with upstream.post(
                info, "/v1/completions", body, {}, headers_deadline=by, deadline=by
            ) as answer:
                await answer.read()
        assert native.asked[0].headers["Authorization"] == "Bearer of-the-cluster"
        assert "Authorization" not in other.asked[0].headers


async def test_an_answer_that_a_browser_would_run_is_not_served(stage: Stage) -> None:
    """The operator's page has the same origin."""
    await stage.pair(answer_headers={"Content-Type": "text/html"})
    status, answer = await stage.ask(BODY)
    assert (status, answer["error"]["code"]) == (502, "bad_agent_answer")
