# SPDX-License-Identifier: Apache-2.0
"""The trace of a request at the proxy, as a collector gets it; agents and collector are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.standins.agents import Fault, StandInAgent
from tests.standins.trace_collector import CollectedSpan, TraceCollector, trace_collector
from tests.unit.proxy.conftest import Stage, StartStage
from tests.unit.proxy.exchange.test_migration import break_once

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 5, "seed": 7}
TRACE_ID, CLIENT_SPAN = "1" * 32, "2" * 16
CLIENT = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01", "tracestate": "vendor=state"}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TraceCollector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with trace_collector() as collector:
        yield collector


@pytest.fixture
async def stage(collector: TraceCollector, start_stage: StartStage) -> Stage:
    return await start_stage(otlp_endpoint=collector.url)


async def request(stage: Stage, *, stream: bool = True, **headers: str) -> None:
    async with stage.post({**BODY, "stream": stream}, headers={**CLIENT, **headers}) as response:
        await response.read()


async def whole_trace(collector: TraceCollector) -> tuple[CollectedSpan, list[CollectedSpan]]:
    """The request's own span, which is exported last, and its children."""
    await collector.until(lambda: any(span.kind == "server" for span in collector.of_trace(TRACE_ID)))
    (server,) = [span for span in collector.of_trace(TRACE_ID) if span.kind == "server"]
    return server, collector.children(server)


def parent_of(agent: StandInAgent, number: int = 0) -> str:
    """The span that the agent was named as its parent."""
    version, trace_id, parent, _ = agent.asked[number].headers["traceparent"].split("-")
    assert (version, trace_id) == ("00", TRACE_ID)
    return parent


async def test_a_stream_is_one_span_with_its_route_and_legs(stage: Stage, collector: TraceCollector) -> None:
    prefill, decode = await stage.pair()
    began = time.time()
    await request(stage, **{"X-Request-Id": "mine"})
    server, (route, prefill_leg, decode_leg) = await whole_trace(collector)
    assert (server.service, server.name, server.kind) == ("kvferry-proxy", "POST /v1/completions", "server")
    assert server.parent_id == CLIENT_SPAN
    assert server.events == ["first token"] and not server.failed
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "stand-in",
        "gen_ai.request.choice.count": 1,
        "kvferry.request_id": "mine",
        "kvferry.stream": True,
        "kvferry.attempts": 1,
    }
    assert [span.name for span in (route, prefill_leg, decode_leg)] == ["route", "prefill leg", "decode leg"]
    assert [span.name for span in collector.children(route)] == ["queue"]
    assert (parent_of(prefill), parent_of(decode)) == (prefill_leg.span_id, decode_leg.span_id)
    assert {leg.kind for leg in (prefill_leg, decode_leg)} == {"client"}
    assert prefill.asked[0].headers["tracestate"] == "vendor=state"
    assert (prefill_leg.attributes["kvferry.agent"], decode_leg.attributes["kvferry.agent"]) == (
        prefill.address,
        decode.address,
    )
    assert began - 1 < server.start <= route.start <= route.end <= prefill_leg.end <= decode_leg.end
    assert decode_leg.end <= server.end < time.time() + 1
    assert not any(span.links or span.failed for span in collector.of_trace(TRACE_ID))


@pytest.mark.parametrize("fault", [Fault("prefill", "reset"), Fault("prefill", "status", status=500)])
async def test_a_retry_links_to_the_leg_that_was_lost(
    stage: Stage, collector: TraceCollector, fault: Fault
) -> None:
    for _ in range(2):
        await stage.pair()
    break_once(stage.agents, fault)
    await request(stage)
    server, (route, lost, again, prefill_leg, decode_leg) = await whole_trace(collector)
    assert server.attributes["kvferry.attempts"] == 2 and not server.failed
    assert (lost.name, lost.failed, lost.attributes["error.type"]) == ("prefill leg", True, "agent_lost")
    assert [span.name for span in (route, again)] == ["route", "route"]
    for span in (again, prefill_leg, decode_leg):
        assert span.links == {lost.span_id: {"kvferry.reason": "retry"}}
        assert span.attributes["kvferry.attempt"] == 2 and not span.failed
    assert not route.links and not lost.links
    assert prefill_leg.attributes["kvferry.agent"] != lost.attributes["kvferry.agent"]


async def test_a_migration_links_to_the_stream_that_broke(stage: Stage, collector: TraceCollector) -> None:
    for _ in range(2):
        await stage.pair()
    break_once(stage.agents, Fault("decode", "cut", after_events=2))
    await request(stage)
    server, children = await whole_trace(collector)
    (broken,) = [span for span in children if span.failed]
    assert (broken.name, broken.attributes["kvferry.attempt"]) == ("decode leg", 1)
    later = [span for span in children if span.attributes["kvferry.attempt"] == 2]
    assert [span.name for span in later] == ["route", "prefill leg", "decode leg"]
    assert all(span.links == {broken.span_id: {"kvferry.reason": "migration"}} for span in later)
    assert server.events == ["first token"] and not server.failed


async def test_what_fails_is_marked_so(stage: Stage, collector: TraceCollector) -> None:
    await request(stage, stream=False)
    server, (route,) = await whole_trace(collector)
    assert server.failed and server.attributes["http.response.status_code"] == 503
    assert (server.attributes["error.type"], route.name) == ("no_agent", "route")


async def test_a_client_that_did_not_sample_is_followed(stage: Stage, collector: TraceCollector) -> None:
    prefill, _ = await stage.pair()
    await request(stage, traceparent=f"00-{'3' * 32}-{CLIENT_SPAN}-00")
    await request(stage)
    await whole_trace(collector)
    _, trace_id, parent, flags = prefill.asked[0].headers["traceparent"].split("-")
    assert (trace_id, flags) == ("3" * 32, "00") and parent != CLIENT_SPAN
    assert not collector.of_trace("3" * 32)


@pytest.mark.parametrize("collects", ["in time", "too late", "at once"])
async def test_the_last_spans_are_exported_at_the_end_but_not_waited_for_long(
    collector: TraceCollector, start_stage: StartStage, monkeypatch: pytest.MonkeyPatch, collects: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    collector.is_stuck = collects != "in time"
    stage = await start_stage(otlp_endpoint=collector.url)
    await stage.pair()
    await request(stage)
    assert not collector.spans
    tracing = stage.proxy.services.tracing
    assert tracing is not None
    at_once = asyncio.Event()
    if collects == "at once":
        asyncio.get_running_loop().call_later(0.1, at_once.set)
    async with asyncio.timeout(20.0):
        await tracing.close(0.3 if collects == "too late" else 30.0, at_once)
    await whole_trace(collector)
