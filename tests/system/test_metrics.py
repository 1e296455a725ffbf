# SPDX-License-Identifier: Apache-2.0
"""What the metrics pages count, against what was sent and what came back: every counter of every page.

Every series is on the page before the first request: Prometheus does not see one grow that begins to exist
with its first count.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import heldout, session
from tests.helpers.metrics import Samples, is_shown, scrape, settled, total, wait_idle
from tests.system.conftest import StartCluster

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
NOT_COUNTED = {
    "kvferry_proxy_canary_probes_total",
    "kvferry_proxy_canary_tokens_total",
    "kvferry_agent_integrity_errors_total",
    "kvferry_agent_num_preemptions_total",
    "kvferry_agent_recomputes_total",
    "kvferry_proxy_agents_lost_total",
    "kvferry_proxy_bad_pings_total",
    "kvferry_proxy_decode_only_requests_total",
    "kvferry_proxy_drops_total",
    "kvferry_proxy_leases_judged_total",
    "kvferry_proxy_migrations_total",
    "kvferry_proxy_prompts_recomputed_total",
    "kvferry_proxy_queue_wait_seconds_count",
    "kvferry_proxy_rejected_cluster_keys_total",
    "kvferry_proxy_rejected_pings_total",
    "kvferry_proxy_rejections_total",
    "kvferry_proxy_retries_denied_total",
    "kvferry_proxy_retries_total",
    "kvferry_proxy_suspect_requests_total",
    "kvferry_transfer_failures_total",
    "kvferry_transfer_prefix_loans_total",
    "kvferry_transfer_prefix_pull_bytes_total",
    "kvferry_transfer_prefix_pull_failures_total",
    "kvferry_transfer_prefix_pulls_total",
    "kvferry_transfer_rebuilds_total",
    "kvferry_transfer_verify_seconds_total",
}
"""Counters of what this load does not cause."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster(
        args=("--prefix-cache", "true"),
        proxy_args=(
            *("--stream-pull-min-tokens", "100", "--split-min-tokens", "8"),
            *("--prefix-pull-min-tokens", "128"),
        ),
    ) as cluster:
        yield cluster


@dataclass(slots=True)
class Received:
    """What a client got."""

    path: str
    status: int
    events: int
    tokens: int
    """Generated ones, as they came; `usage` is what the agent says of them."""
    usage: dict[str, Any]
    finish_reasons: list[str]
    timing: dict[str, Any]
    """What the agent that ended it tells of it; `backend` is that of its pull, if it had one."""


async def ask(http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Received:
    """Send one request, and read the response to its end."""
    asked = {
        "model": MODEL,
        "max_tokens": 8,
        "seed": 5,
        "kvferry_timing": True,
        "return_token_ids": True,
        **body,
    }
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
    choices = [choice for event in events for choice in event.get("choices", ())]
    reasons = [choice["finish_reason"] for choice in choices]
    return Received(
        path=path,
        status=response.status,
        events=len(lines) + 1 if asked.get("stream") and response.status == 200 else 0,
        tokens=sum(len(choice["token_ids"]) for choice in choices),
        usage=next((event["usage"] for event in events if event.get("usage")), {}),
        finish_reasons=[reason for reason in reasons if reason],
        timing=next((event["kvferry_timing"] for event in events if event.get("kvferry_timing")), {}),
    )


@dataclass(slots=True)
class Growth:
    """What each series of each page has grown by, and which counters were looked at."""

    before: dict[str, Samples]
    after: dict[str, Samples]
    _seen: set[tuple[str, str, tuple[tuple[str, str], ...]]] = field(default_factory=set)

    def of(self, name: str, *parts: str, **labels: str) -> float:
        """Of the series of that name with these labels together, at these parts, or at all agents."""
        at = parts or tuple(part for part in self.after if part != "proxy")
        for part in at:
            self._seen |= {
                (part, key, have)
                for key, have in self.after[part]
                if key == name and set(labels.items()) <= set(have)
            }
        return sum(
            total(self.after[part], name, **labels) - total(self.before[part], name, **labels) for part in at
        )

    def assert_all_looked_at(self) -> None:
        """Every counter of ours is on some page, and was looked at or is one of `NOT_COUNTED`.

        A series that was not looked at has not grown.
        """
        counters = {
            (part, name, labels): value - self.before[part].get((name, labels), 0.0)
            for part, page in self.after.items()
            for (name, labels), value in page.items()
            if name.startswith("kvferry_") and name.endswith(("_total", "_count"))
        }
        looked_at = {name for _, name, _ in self._seen if name.endswith(("_total", "_count"))}
        assert {name for _, name, _ in counters} == looked_at | NOT_COUNTED
        assert not looked_at & NOT_COUNTED
        assert not {key: grown for key, grown in counters.items() if grown and key not in self._seen}


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
    pulled = [each for each in served if each.timing["backend"] is not None]
    failed = [each.timing["failed_pull"] for each in served if each.timing["failed_pull"]]
    assert len(pulled) == STREAMED + 3, f"all long prompts that want more than one token: {failed}"

    await settled(cluster.agents["decode-0"].url, "kvferry_transfer_pulls_total", len(pulled))
    for agent in cluster.agents.values():
        await wait_idle(agent.url, timeout_s=10)
    after = await pages(cluster)

    for part, page in after.items():
        new = {key[0] for key in page.keys() - before[part].keys() if key[0].startswith("kvferry_")}
        assert new <= MEASURED, part
    assert not {name for page in before.values() for name, _ in page} & MEASURED

    growth = Growth(before, after)
    assert_requests_counted(growth, received)
    assert_legs_counted(growth, served, pulled)
    assert_tokens_counted(growth, served, pulled)
    assert_pulls_counted(growth, pulled)
    for leg in ("prefill", "decode"):
        compared = growth.of("kvferry_proxy_prediction_error_ratio_count", "proxy", leg=leg)
        assert 0 <= compared <= len(served), (leg, "only those that agents with figures served")
    growth.assert_all_looked_at()


def assert_requests_counted(growth: Growth, received: list[Received]) -> None:
    """What the proxy counts of clients' requests."""
    served = [each for each in received if each.status == 200]
    streams = [each for each in served if each.events]
    name = "kvferry_proxy_requests_total"
    for path in ("completions", "chat/completions", "messages", "responses"):
        statuses = Counter(each.status for each in received if each.path == path)
        for status in (200, 400, 404, 429, 499, 500, 502, 503, 504):
            labels = {"endpoint": path, "status": str(status)}
            assert growth.of(name, "proxy", **labels) == statuses[status], labels
    assert growth.of(name, "proxy", model_name=MODEL) == len(served)
    assert growth.of(name, "proxy", model_name="") == 2, (
        "a model that nobody serves, and a body that was refused"
    )
    name = "kvferry_proxy_e2e_request_latency_seconds_count"
    assert growth.of(name, "proxy", model_name=MODEL) == len(served)
    assert growth.of(name, "proxy", model_name="") == 2
    events = sum(each.events for each in streams)
    assert growth.of("kvferry_proxy_stream_events_total", "proxy") == events
    for name in ("time_to_first_token", "request_time_per_output_token"):
        assert growth.of(f"kvferry_proxy_{name}_seconds_count", "proxy", model_name=MODEL) == len(streams), (
            name
        )
    for objective in ("ttft", "tpot"):  # a slow machine may miss them
        missed = growth.of("kvferry_proxy_missed_objectives_total", "proxy", objective=objective)
        assert 0 <= missed <= len(streams), objective
    # Events that come together are one arrival.
    arrivals = growth.of("kvferry_proxy_inter_token_latency_seconds_count", "proxy", model_name=MODEL)
    assert len(streams) <= arrivals <= events - len(streams)


def assert_legs_counted(growth: Growth, served: list[Received], pulled: list[Received]) -> None:
    """Each request is one leg, or two with a pull between them."""
    legs, streams = len(served) + len(pulled), sum(bool(each.events) for each in served)
    for phase, count in {
        "route": len(served) + 2,
        "prefill": len(pulled),
        "decode_wait": len(served),
        "decode": streams,
    }.items():
        assert growth.of("kvferry_proxy_phase_seconds_count", "proxy", phase=phase) == count, phase
    assert growth.of("kvferry_proxy_agent_legs_total", "proxy", outcome="succeeded") == legs
    assert growth.of("kvferry_proxy_agent_legs_total", "proxy", outcome="failed") == 0
    assert growth.of("kvferry_proxy_streamed_pulls_total", "proxy") == len(pulled)
    assert growth.of("kvferry_proxy_prefix_sources_total", "proxy") == 1, "the last one was sent before"
    assert growth.of("kvferry_agent_requests_total", status="200") == legs
    assert growth.of("kvferry_agent_request_queue_time_seconds_count") == legs
    early = sum(each.timing["pull_early_blocks"] > 0 for each in pulled)
    for part, phases in {
        "prefill-0": {"queue": len(pulled) + 1, "prefill": len(pulled) + 1},
        "decode-0": {
            "queue": len(pulled) + 2,
            "prefill": 2,  # the short prompts
            "pull_wait": len(pulled),
            "pull": len(pulled),
            "pull_tail": early,
            "decode_queue": len(pulled) + 2,
            "first_step": len(pulled) + 2,
        },
    }.items():
        for phase, count in phases.items():
            assert growth.of("kvferry_agent_phase_seconds_count", part, phase=phase) == count, (part, phase)


def assert_tokens_counted(growth: Growth, served: list[Received], pulled: list[Received]) -> None:
    """Tokens of prompts and answers, where they were computed and where they ended."""
    usage = Counter[str]()
    for each in served:
        usage.update({name: each.usage[name] for name in ("prompt_tokens", "completion_tokens")})
        usage["cached_tokens"] += (each.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    assert usage["cached_tokens"], "the last one was sent before"
    assert [each.tokens for each in served] == [each.usage["completion_tokens"] for each in served]
    assert growth.of("kvferry_agent_generation_tokens_total") == sum(each.tokens for each in served)
    assert growth.of("kvferry_agent_prompt_tokens_total") == usage["prompt_tokens"]
    billed = {"prompt": usage["prompt_tokens"], "generation": usage["completion_tokens"]}
    for kind, tokens in billed.items():
        assert growth.of(f"kvferry_proxy_{kind}_tokens_total", "proxy", model_name=MODEL) == tokens
    assert growth.of("kvferry_agent_prompt_tokens_cached_total") == usage["cached_tokens"]
    assert growth.of("kvferry_agent_request_prompt_tokens_sum") == usage["prompt_tokens"]
    assert growth.of("kvferry_agent_request_prompt_tokens_count") == len(served)
    assert growth.of("kvferry_agent_request_generation_tokens_sum") == usage["completion_tokens"]
    assert growth.of("kvferry_agent_request_generation_tokens_count") == len(served)
    reasons = Counter(reason for each in served for reason in each.finish_reasons)
    for reason in ("stop", "length"):
        name = "kvferry_agent_request_success_total"
        assert growth.of(name, finished_reason=reason) == reasons[reason], reason
    name = "kvferry_agent_prompt_tokens_by_source_total"
    computed = usage["prompt_tokens"] - usage["cached_tokens"]
    assert growth.of(name, source="computed") == computed
    assert growth.of(name, "prefill-0", source="cached") == usage["cached_tokens"]
    here = growth.of(name, "decode-0", source="cached") + growth.of(name, "decode-0", source="pulled")
    assert here == sum(each.usage["prompt_tokens"] for each in pulled)
    steps = growth.of("kvferry_agent_steps_total")
    longest = max(each.usage["completion_tokens"] // len(each.finish_reasons) for each in served)
    assert longest <= steps <= computed + usage["completion_tokens"], "a step has a token at least"
    for part in ("prefill-0", "decode-0"):
        assert growth.of("kvferry_agent_prefill_seconds_total", part) > 0


def assert_pulls_counted(growth: Growth, pulled: list[Received]) -> None:
    """What the decode agent pulled, against what it told the clients."""
    assert growth.of("kvferry_transfer_pulls_total") == len(pulled)
    early = sum(each.timing["pull_early_blocks"] > 0 for each in pulled)
    assert growth.of("kvferry_transfer_streamed_pulls_total") == early
    for backend, count in Counter(each.timing["backend"] for each in pulled).items():
        assert growth.of("kvferry_transfer_pull_seconds_count", backend=backend) == count
    for name in ("bytes", "descriptors"):
        told = sum(each.timing[f"pull_{name}"] for each in pulled)
        assert growth.of(f"kvferry_transfer_{name}_total") == told > 0
    assert growth.of("kvferry_transfer_leases_ended_total", cause="released") == len(pulled)
    for part in ("prefill-0", "decode-0"):
        assert growth.of("kvferry_transfer_handshakes_total", part) == 1


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
            if is_shown(page, wanted):
                by_role = {role: total(page, wanted, role=role, model_name=MODEL) for role in by_role}
    assert max(by_role.values()) < 10.0, by_role
    for agent in cluster.agents.values():
        await wait_idle(agent.url, timeout_s=10)
    async with asyncio.timeout(30):
        while total(page := await scrape(cluster.url), "kvferry_proxy_prefill_backlog_seconds"):
            await asyncio.sleep(0.1)
    assert total(page, "kvferry_proxy_decode_pressure", model_name=MODEL) == 0.0
    decode = await scrape(cluster.agents["decode-0"].url)
    assert total(decode, "kvferry_agent_full_step_seconds") > 0.0
    assert 16 <= total(decode, "kvferry_agent_decode_slots") <= 64, "its pool holds 16 of the longest"
