# SPDX-License-Identifier: Apache-2.0
"""One trace over the proxy, both agents and the transfer, as a collector gets it; and the logs beside it.

A stand-in for a backend decodes what is asserted on. The processes export to it, or to a real collector that
exports to it (`make test-traces`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.deploy.launcher import Cluster, Process
from tests.helpers.client import heldout, session
from tests.helpers.metrics import scrape, total
from tests.standins import faults
from tests.standins.trace_collector import CollectedSpan, TraceCollector, trace_collector
from tests.system.collector import ROTEL, rotel
from tests.system.conftest import StartCluster

pytestmark = pytest.mark.timeout(120)

BODY = {"model": "ferry-tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
PROMPT = max((prompt.prompt for prompt in heldout()), key=len)[:400]
PREFILL = ("POST /v1/completions", "kvferry-agent", ["queue", "prefill"])
DECODE = ("POST /v1/completions", "kvferry-agent", ["queue", "pull_wait", "pull", "decode_queue", "decode"])
CLIENT_SPAN_ID = "2" * 16
RECOMPUTED = ["queue", "pull", "prefill", "decode_queue", "decode"]
ONE_AFTER_THE_OTHER = ("--stream-pull-min-tokens", "0")
"""Of a long prompt the decode leg is sent first otherwise."""
SLACK_S = 0.002
"""A wall clock may be set between what two processes read of it."""


@dataclass(slots=True)
class Exports:
    """`url` is what processes are given."""

    url: str
    _backend: TraceCollector
    _between: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def collected(self, *trace_ids: str) -> TraceCollector:
        """What arrived, once the processes have ended. A collector between them is ended as well.

        That happens once the clients' requests of these traces are here: ending, it gives what it still has
        little time.
        """
        await self._backend.until(
            lambda: (
                set(trace_ids)
                <= {span.trace_id for span in self._backend.spans if span.parent_id == CLIENT_SPAN_ID}
            )
        )
        await self._between.aclose()
        return self._backend


@pytest.fixture(
    params=[
        "direct",
        pytest.param(
            "rotel",
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(not ROTEL.exists(), reason="no Rotel: run `make test-traces`"),
            ],
        ),
    ]
)
async def exports(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Exports]:
    async with trace_collector() as backend, AsyncExitStack() as between:
        if request.param == "direct":
            yield Exports(backend.url, backend)
        else:
            url = await between.enter_async_context(rotel(backend.url, tmp_path))
            yield Exports(url, backend, between)


def traceparent(number: int) -> tuple[str, dict[str, str]]:
    """A trace id, and the headers of a request that continues that trace."""
    trace_id = f"{number:032x}"
    return trace_id, {
        "traceparent": f"00-{trace_id}-{CLIENT_SPAN_ID}-01",
        "X-Request-Id": f"request-{number}",
    }


async def stream(http: aiohttp.ClientSession, url: str, headers: dict[str, str], **fields: Any) -> list[Any]:
    """The events of one streamed completion."""
    async with http.post(
        f"{url}/v1/completions", json={**BODY, "prompt": PROMPT, **fields}, headers=headers
    ) as got:
        assert got.status == 200, await got.text()
        lines = (await got.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def request_span(collector: TraceCollector, trace_id: str) -> CollectedSpan:
    """The proxy's span of the client's request."""
    (span,) = [span for span in collector.of_trace(trace_id) if span.parent_id == CLIENT_SPAN_ID]
    return span


def assert_agent(
    collector: TraceCollector, leg: CollectedSpan, like: tuple[str, str, list[str]]
) -> CollectedSpan:
    """Below a leg's span there is one agent's, with these phases in order and within it. Returns it."""
    (agent,) = collector.children(leg)
    phases = collector.children(agent)
    assert (agent.name, agent.service, [phase.name for phase in phases]) == like
    assert agent.kind == "server" and agent.attributes["http.response.status_code"] == 200
    for inner, outer in ((agent, leg), *((phase, agent) for phase in phases)):
        assert outer.start - SLACK_S <= inner.start <= inner.end <= outer.end + SLACK_S, (inner, outer)
    return agent


def assert_pulled(collector: TraceCollector, agent: CollectedSpan, ranks: int) -> None:
    """The pull has a read of every rank, which together moved all its bytes."""
    (pull,) = [span for span in collector.children(agent) if span.name == "pull"]
    reads = collector.children(pull)
    assert sorted(read.attributes["kvferry.rank"] for read in reads) == [*range(ranks)]
    assert {read.name for read in reads} == {"read"}
    moved = [read.attributes["kvferry.bytes"] for read in reads]
    assert sum(moved) == pull.attributes["kvferry.bytes"] > 0 and all(moved)
    for read in reads:
        assert pull.start - SLACK_S <= read.start <= read.end <= pull.end + SLACK_S, (read, pull)


async def test_one_request_is_one_trace_and_its_logs_name_it(
    start_cluster: StartCluster, exports: Exports
) -> None:
    """Exported when the processes end: by then each has its last spans out."""
    args = ("--otlp-endpoint", exports.url, "--log-format", "json")
    trace_id, headers = traceparent(1)
    async with (
        start_cluster(
            args=args, decode_args=("--tp", "2"), proxy_args=(*args, *ONE_AFTER_THE_OTHER)
        ) as cluster,
        session() as http,
    ):
        events = await stream(http, cluster.url, headers)
        logs = {process.name: process.log for process in cluster.processes}
    collector = await exports.collected(trace_id)
    (answer_id,) = {event["id"] for event in events}
    assert answer_id.startswith("cmpl-request-1-")
    server = request_span(collector, trace_id)
    route, prefill_leg, decode_leg = collector.children(server)
    assert [span.name for span in (route, prefill_leg, decode_leg)] == ["route", "prefill leg", "decode leg"]
    assert (server.service, server.events) == ("kvferry-proxy", ["first token"])
    prefill = assert_agent(collector, prefill_leg, PREFILL)
    decode = assert_agent(collector, decode_leg, DECODE)
    assert_pulled(collector, decode, ranks=2)
    assert prefill.attributes["kvferry.transfer_id"] == route.attributes["kvferry.transfer_id"]
    assert decode.attributes["kvferry.transfer_id"] == route.attributes["kvferry.transfer_id"]
    assert (prefill.attributes["kvferry.leg"], decode.attributes["kvferry.leg"]) == ("prefill", "decode")
    assert decode.attributes["gen_ai.usage.output_tokens"] == 8
    assert len(collector.of_trace(trace_id)) == 1 + 4 + 1 + len(PREFILL[2]) + 1 + len(DECODE[2]) + 2
    for name, log in logs.items():
        lines = [json.loads(line) for line in log.tail(1000).splitlines()]
        assert all(datetime.fromisoformat(line["time"]).utcoffset() == timedelta() for line in lines)
        (line,) = [line for line in lines if line["message"] == "request"]
        assert (line["request_id"], line["trace_id"], line["level"]) == ("request-1", trace_id, "INFO"), name


@pytest.mark.full
async def test_a_failed_pull_has_a_span_that_says_why(start_cluster: StartCluster, exports: Exports) -> None:
    """Every read is cut, and the decode agent computes the prompt itself."""
    args = ("--otlp-endpoint", exports.url)
    tcp, trace_id, headers = ("--transfer", "tcp"), *traceparent(3)
    async with (
        start_cluster(
            module=faults.AGENT,
            args=(*args, *tcp),
            prefill_args=("--tcp-fault", "drop"),
            proxy_args=(*args, *ONE_AFTER_THE_OTHER),
        ) as cluster,
        session() as http,
    ):
        await stream(http, cluster.url, headers)
    collector = await exports.collected(trace_id)
    (pull,) = [span for span in collector.of_trace(trace_id) if span.failed]
    assert (pull.name, pull.attributes) == ("pull", {"kvferry.backend": "tcp", "error.type": "read_failed"})
    *_, decode_leg = collector.children(request_span(collector, trace_id))
    recomputed = ("POST /v1/completions", "kvferry-agent", RECOMPUTED)
    agent = assert_agent(collector, decode_leg, recomputed)
    assert pull in collector.children(agent) and agent.attributes["kvferry.recomputed"]


async def serving_stream(cluster: Cluster) -> Process:
    """The decode agent that has a request."""
    decoders = [agent for name, agent in cluster.agents.items() if name.startswith("decode")]
    async with asyncio.timeout(30):
        while True:
            for agent in decoders:
                if total(await scrape(agent.url), "kvferry_agent_num_requests_running"):
                    return agent
            await asyncio.sleep(0.02)


async def other_prefill_agent(http: aiohttp.ClientSession, cluster: Cluster, request_id: str) -> Process:
    """The prefill agent that a request did not end at: the spans of one that is killed may be lost."""
    async with http.get(f"{cluster.url}/ui/requests/{request_id}") as got:
        served = (await got.json())["attempts"][-1]["prefill"]
    (other,) = [
        agent for name, agent in cluster.agents.items() if name.startswith("prefill") and agent.url != served
    ]
    return other


def assert_second_try(collector: TraceCollector, trace_id: str, lost_leg: str, why: str) -> None:
    """One leg was lost, and every span of the second try links to it; that try went to other agents."""
    server = request_span(collector, trace_id)
    children = collector.children(server)
    (lost,) = [span for span in children if span.failed]
    assert (lost.name, lost.attributes["error.type"]) == (lost_leg, "agent_lost")
    again = [span for span in children if span.attributes["kvferry.attempt"] == 2]
    assert [span.name for span in again] == ["route", "prefill leg", "decode leg"]
    assert all(span.links == {lost.span_id: {"kvferry.reason": why}} for span in again)
    assert server.attributes["kvferry.attempts"] == 2 and not server.failed
    assert not collector.children(lost)  # its agent was killed, and its spans with it
    assert_agent(collector, again[1], PREFILL)
    assert_pulled(collector, assert_agent(collector, again[2], DECODE), ranks=1)


@pytest.mark.full
async def test_a_retry_and_a_migration_link_to_what_was_lost(
    start_cluster: StartCluster, exports: Exports
) -> None:
    args = ("--otlp-endpoint", exports.url, "--max-model-len", "1536", "--lease-s", "2")
    proxy_args = ("--otlp-endpoint", exports.url, *ONE_AFTER_THE_OTHER)
    async with (
        start_cluster(prefill=2, decode=2, args=args, proxy_args=proxy_args) as cluster,
        session() as http,
    ):
        migrated, headers = traceparent(7)
        running = asyncio.ensure_future(stream(http, cluster.url, headers, max_tokens=900))
        doomed = await serving_stream(cluster)
        os.kill(doomed.pid, signal.SIGKILL)
        await running
        doomed = await other_prefill_agent(http, cluster, headers["X-Request-Id"])
        os.kill(doomed.pid, signal.SIGKILL)
        await doomed.process.wait()
        retried = []
        for number in (8, 9):  # one for each prefill agent, in turn
            trace_id, headers = traceparent(number)
            await stream(http, cluster.url, headers)
            retried.append(trace_id)
    collector = await exports.collected(migrated, *retried)
    assert_second_try(collector, migrated, "decode leg", "migration")
    (trace_id,) = [
        each for each in retried if request_span(collector, each).attributes["kvferry.attempts"] == 2
    ]
    assert_second_try(collector, trace_id, "prefill leg", "retry")
