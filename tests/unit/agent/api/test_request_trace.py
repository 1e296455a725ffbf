# SPDX-License-Identifier: Apache-2.0
"""The spans that an agent makes of its engine's times, as a stand-in for a collector gets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry.agent.api.request_trace import end_trace
from kvferry.agent.messages.requests import FailedPull, Timing
from kvferry.common.telemetry.spans import Tracing
from kvferry.transfer.events import RankRead
from tests.standins.trace_collector import CollectedSpan, TraceCollector, trace_collector

PULLED = {"queue_s": 0.5, "arrived_at": 1.0, "prompt_done_at": 4.0, "first_step_at": 4.5, "backend": "tcp"}


@asynccontextmanager
async def exported(
    timing: Timing | None,
    status: int = 200,
    code: str | None = None,
    failed_pull: FailedPull | None = None,
) -> AsyncIterator[TraceCollector]:
    """What a collector has of a request that came at 1 s and ended at 9 s of the monotonic clock."""
    async with trace_collector() as collector:
        tracing = Tracing(collector.url, {"service.name": "agent"})
        span = tracing.serve("POST /v1/completions", 1.0, {}, {})
        about = {"kvferry.leg": "decode"}
        end_trace(span, 9.0, status, code, timing, about, failed_pull=failed_pull)
        await tracing.close(10.0, asyncio.Event())
        yield collector


def request(collector: TraceCollector) -> CollectedSpan:
    (span,) = [span for span in collector.spans if span.kind == "server"]
    return span


def lasted(collector: TraceCollector, parent: CollectedSpan) -> dict[str, tuple[float, float]]:
    """Begin and end of its children, in seconds of the monotonic clock."""
    return {
        span.name: (round(span.start - parent.start + 1.0, 6), round(span.end - parent.start + 1.0, 6))
        for span in collector.children(parent)
    }


async def test_a_prefill_is_queued_and_computed() -> None:
    timing = Timing(queue_s=0.5, prefix_pull_s=0.25, prefill_s=2.0, arrived_at=1.0, prompt_done_at=3.75)
    async with exported(timing) as collector:
        server = request(collector)
        assert lasted(collector, server) == {
            "queue": (1.0, 1.5),
            "prefix_pull": (1.5, 1.75),
            "prefill": (1.75, 3.75),
        }
    assert server.end - server.start == pytest.approx(8.0, abs=1e-6)
    assert (server.attributes["kvferry.leg"], server.attributes["http.response.status_code"]) == (
        "decode",
        200,
    )
    assert abs(server.start - (time.time() - time.monotonic() + 1.0)) < 1.0


async def test_a_pull_is_shown_with_what_each_rank_read() -> None:
    reads = tuple(
        RankRead(rank=rank, began_at=2.0 + rank, ended_at=3.5 + rank / 4, nbytes=100, descriptors=3)
        for rank in range(2)
    )
    timing = Timing(
        **PULLED, pull_wait_s=0.5, pull_s=2.0, pull_began_at=2.0, pull_bytes=200, rank_reads=reads
    )
    async with exported(timing) as collector:
        server = request(collector)
        assert lasted(collector, server) == {
            "queue": (1.0, 1.5),
            "pull_wait": (1.5, 2.0),
            "pull": (2.0, 4.0),
            "decode_queue": (4.0, 4.5),
            "decode": (4.5, 9.0),
        }
        (pull,) = [span for span in collector.children(server) if span.name == "pull"]
        of_ranks = collector.children(pull)
    assert (pull.attributes["kvferry.backend"], pull.attributes["kvferry.bytes"]) == ("tcp", 200)
    assert [span.attributes for span in of_ranks] == [
        {"kvferry.rank": rank, "kvferry.bytes": 100, "kvferry.descriptors": 3} for rank in range(2)
    ]
    begins = [round(span.start - pull.start, 6) for span in of_ranks]
    assert begins == [0.0, 1.0]


@pytest.mark.parametrize(
    ("status", "code", "failed"), [(500, "engine_died", True), (400, "bad", False), (499, None, False)]
)
async def test_a_request_without_times_is_one_span(status: int, code: str | None, failed: bool) -> None:
    async with exported(None, status, code) as collector:
        (span,) = collector.spans
    assert (span.failed, span.attributes.get("error.type")) == (failed, code)


FAILED = FailedPull(reason="lease_expired", backend="tcp", began_at=1.5, ended_at=2.5)


def assert_failed_pull(collector: TraceCollector) -> None:
    """The one failed span is the pull's, and says why."""
    (pull,) = [span for span in collector.children(request(collector)) if span.failed]
    assert pull.name == "pull"
    assert pull.attributes == {"kvferry.backend": "tcp", "error.type": "lease_expired"}


async def test_a_failed_pull_is_shown_before_the_prefill_in_its_place() -> None:
    timing = Timing(
        queue_s=0.5,
        prefill_s=2.5,
        arrived_at=1.0,
        prompt_done_at=4.0,
        first_step_at=4.5,
        recomputed=True,
        failed_pull=FAILED,
    )
    async with exported(timing, failed_pull=FAILED) as collector:
        server = request(collector)
        assert lasted(collector, server) == {
            "queue": (1.0, 1.5),
            "pull": (1.5, 2.5),
            "prefill": (2.5, 4.0),
            "decode_queue": (4.0, 4.5),
            "decode": (4.5, 9.0),
        }
        assert_failed_pull(collector)
    assert not server.failed and server.attributes["kvferry.recomputed"]


async def test_a_request_that_fails_with_its_pull_shows_the_pull() -> None:
    async with exported(None, 502, "pull_failed", failed_pull=FAILED) as collector:
        server = request(collector)
        assert lasted(collector, server) == {"pull": (1.5, 2.5)}
        assert_failed_pull(collector)
    assert server.attributes["error.type"] == "pull_failed"


async def test_a_failed_pull_of_a_prefix_is_marked() -> None:
    timing = Timing(
        queue_s=0.5,
        prefix_pull_s=0.25,
        prefix_failure="refused",
        prefill_s=2.0,
        arrived_at=1.0,
        prompt_done_at=3.75,
    )
    async with exported(timing) as collector:
        (pull,) = [span for span in collector.spans if span.failed]
    assert (pull.name, pull.attributes["error.type"]) == ("prefix_pull", "refused")
