# SPDX-License-Identifier: Apache-2.0
"""What the metrics pages count, against what was sent and what came back.

Every series is on the page before the first request: Prometheus does not see one grow that begins to exist
with its first count.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.system.client import heldout, session
from tests.system.conftest import StartCluster
from tests.system.metrics import Samples, scrape, total, wait_idle

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MODEL = "ferry-tiny"
SHORT, *_, LONG = sorted((prompt.prompt for prompt in heldout()), key=len)
STREAMED = 3
"""Long prompts with this many choices between them are pulled while they are computed."""
MEASURED = {
    "kvferry_agent_full_step_seconds",
    "kvferry_agent_prefill_backlog_seconds",
    "kvferry_proxy_prefill_backlog_seconds",
    "kvferry_proxy_wanted_agents",
}
"""Gauges that are absent until agents have measured what a request takes: no count is missed."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster(
        args=("--prefix-cache", "true"),
        proxy_args=("--stream-pull-min-tokens", "100", "--split-min-tokens", "8"),
    ) as cluster:
        yield cluster


@dataclass(slots=True)
class Received:
    """What a client got."""

    path: str
    status: int
    events: int
    usage: dict[str, Any]
    finish_reasons: list[str]


async def ask(http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Received:
    """Send one request, and read the response to its end."""
    asked = {"model": MODEL, "max_tokens": 8, "seed": 5, **body}
    if asked.get("stream"):
        asked["stream_options"] = {"include_usage": True}
    async with http.post(f"{url}/v1/{path}", json=asked) as response:
        text = await response.text()
    if not asked.get("stream") or response.status != 200:
        events = [json.loads(text)]
    else:
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
    reasons = [choice["finish_reason"] for event in events for choice in event.get("choices", ())]
    return Received(
        path=path,
        status=response.status,
        events=len(lines) + 1 if asked.get("stream") and response.status == 200 else 0,
        usage=next((event["usage"] for event in events if event.get("usage")), {}),
        finish_reasons=[reason for reason in reasons if reason],
    )


async def pages(cluster: Cluster) -> dict[str, Samples]:
    """The metrics page of the proxy and of every agent."""
    return {
        "proxy": await scrape(cluster.url),
        **{name: await scrape(agent.url) for name, agent in cluster.agents.items()},
    }


async def test_every_counter_agrees_with_what_was_sent_and_received(cluster: Cluster) -> None:
    before = await pages(cluster)
    streams = [
        {"prompt": f"{number} {LONG}", "stream": True, "n": 1 + number % 2} for number in range(STREAMED)
    ]
    async with session() as http:
        received = await asyncio.gather(
            *(ask(http, cluster.url, "completions", body) for body in streams),
            ask(http, cluster.url, "completions", {"prompt": LONG, "temperature": 0}),
            ask(http, cluster.url, "completions", {"prompt": LONG, "max_tokens": 1}),
            ask(http, cluster.url, "completions", {"prompt": [5, 6, 7]}),
            ask(http, cluster.url, "completions", {"prompt": SHORT, "stream": True, "stop": ["1", "2", " "]}),
            ask(
                http,
                cluster.url,
                "chat/completions",
                {"messages": [{"role": "user", "content": LONG}], "n": 3},
            ),
            ask(http, cluster.url, "completions", {"prompt": "p", "model": "nobody's"}),
            ask(http, cluster.url, "completions", {"prompt": "p", "max_tokens": -1}),
        )
        received.append(await ask(http, cluster.url, "completions", {"prompt": LONG}))
    served = [each for each in received if each.status == 200]
    assert [each.status for each in received].count(200) == len(received) - 2
    usage = Counter[str]()
    for each in served:
        usage.update({name: each.usage[name] for name in ("prompt_tokens", "completion_tokens")})
        usage["cached_tokens"] += (each.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    assert usage["cached_tokens"], "the last one was sent before"

    for agent in cluster.agents.values():
        await wait_idle(agent.url, timeout_s=10)
    after = await pages(cluster)

    for part, page in after.items():
        new = {key[0] for key in page.keys() - before[part].keys() if key[0].startswith("kvferry_")}
        assert new <= MEASURED, part
    assert not {name for page in before.values() for name, _ in page} & MEASURED

    def grown(name: str, *where: str, **labels: str) -> float:
        parts = where or tuple(cluster.agents)
        return sum(total(after[part], name, **labels) - total(before[part], name, **labels) for part in parts)

    assert grown("kvferry_agent_generation_tokens_total") == usage["completion_tokens"]
    assert grown("kvferry_agent_prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("kvferry_agent_prompt_tokens_cached_total") == usage["cached_tokens"]
    assert grown("kvferry_agent_request_prompt_tokens_sum") == usage["prompt_tokens"]
    assert grown("kvferry_agent_request_prompt_tokens_count") == len(served)
    assert grown("kvferry_agent_request_generation_tokens_sum") == usage["completion_tokens"]
    assert grown("kvferry_agent_request_generation_tokens_count") == len(served)
    reasons = Counter(reason for each in served for reason in each.finish_reasons)
    for reason in ("stop", "length"):
        name = "kvferry_agent_request_success_total"
        assert grown(name, finished_reason=reason) == reasons[reason], reason

    for path, statuses in (
        (path, Counter(each.status for each in received if each.path == path))
        for path in ("completions", "chat/completions")
    ):
        for status in (200, 400, 404, 429, 499, 500, 502, 503, 504):
            labels = {"endpoint": path, "status": str(status)}
            assert grown("kvferry_proxy_requests_total", "proxy", **labels) == statuses[status], labels
    name = "kvferry_proxy_requests_total"
    assert grown(name, "proxy", model=MODEL) == len(served)
    assert grown(name, "proxy", model="") == 2, "a model that nobody serves, and a body that was refused"
    assert grown("kvferry_proxy_e2e_request_latency_seconds_count", "proxy") == len(received)
    name = "kvferry_proxy_time_to_first_token_seconds_count"
    assert grown(name, "proxy", model=MODEL) == sum(bool(each.events) for each in served)
    assert grown("kvferry_proxy_stream_events_total", "proxy") == sum(each.events for each in served)

    pulls = grown("kvferry_transfer_pulls_total")
    assert pulls >= STREAMED + 2
    assert grown("kvferry_transfer_pull_seconds_count") == pulls
    assert grown("kvferry_transfer_leases_ended_total", cause="released") == pulls
    assert grown("kvferry_agent_phase_seconds_count", phase="pull") == pulls
    assert grown("kvferry_agent_phase_seconds_count", "decode-0", phase="prefill") == 2, "the short prompts"
    legs = grown("kvferry_agent_requests_total", status="200")
    assert legs == len(served) + pulls
    assert grown("kvferry_proxy_agent_legs_total", "proxy", outcome="succeeded") == legs
    assert grown("kvferry_proxy_agent_legs_total", "proxy", outcome="failed") == 0
    assert grown("kvferry_agent_request_queue_time_seconds_count") == legs


async def test_what_agents_have_measured_is_exported_as_signals_to_scale_by(cluster: Cluster) -> None:
    """It is asked until both agents have told of their work.

    What a decode step takes is said after `MIN_STEPS` that did nothing else: a few short answers that are
    decoded together do not make these.
    """
    wanted, count = "kvferry_proxy_wanted_agents", 0
    by_role = {"prefill": 0.0, "decode": 0.0}
    async with session() as http, asyncio.timeout(45):
        while not all(by_role.values()):
            answers = [
                ask(http, cluster.url, "completions", {"prompt": f"{number} {LONG}", "max_tokens": 32})
                for number in range(count, count + 4)
            ]
            count += 4
            assert {each.status for each in await asyncio.gather(*answers)} == {200}
            page = await scrape(cluster.url)
            by_role = {role: total(page, wanted, role=role, model=MODEL) for role in by_role}
    assert max(by_role.values()) < 10.0, by_role
    for agent in cluster.agents.values():
        await wait_idle(agent.url, timeout_s=10)
    async with asyncio.timeout(30):
        while total(page := await scrape(cluster.url), "kvferry_proxy_prefill_backlog_seconds"):
            await asyncio.sleep(0.1)
    assert total(page, "kvferry_proxy_decode_pressure", model=MODEL) == 0.0
    decode = await scrape(cluster.agents["decode-0"].url)
    assert total(decode, "kvferry_agent_full_step_seconds") > 0.0
    assert 16 <= total(decode, "kvferry_agent_decode_slots") <= 64, "its pool holds 16 of the longest"
