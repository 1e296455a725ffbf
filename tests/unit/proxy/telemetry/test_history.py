# SPDX-License-Identifier: Apache-2.0
"""The last minutes of traffic: what is charted, and what is forgotten."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.telemetry.fast_metrics import BucketCounts, quantile
from kvferry.proxy.telemetry.history import (
    MAX_FAILURES,
    NUM_SLICES,
    SLICE_S,
    Failure,
    FailureCount,
    FailureLog,
    History,
)
from kvferry.proxy.telemetry.metrics import Metrics

NOW = 1000.0


def failure(**fields: object) -> Failure:
    values = {"endpoint": "completions", "status": 502, "code": "lost", "model": "m", "request_id": "r"}
    return Failure(**(values | fields))  # type: ignore[arg-type]


def test_a_slice_holds_what_was_counted_within_it() -> None:
    history, metrics = History(), Metrics()
    metrics.events += 1000
    history.record(metrics.totals(), NOW)
    metrics.events += 10
    metrics.of_model("").ttft.observe(0.15)
    metrics.of_model("").tpot.observe(0.025)
    metrics.ended("completions", 200)
    metrics.ended("completions", 499)
    metrics.ended("completions", 502)
    history.record(metrics.totals(), NOW + 2 * SLICE_S)
    metrics.events += 1000  # in the slice that is not over yet
    charts = history.charts()
    assert {len(each) for each in (charts.events, charts.ttft_p50, charts.failures)} == {NUM_SLICES}
    assert charts.events[-1] == 10 / (2 * SLICE_S), "a late snapshot makes a longer slice"
    assert charts.requests[-1] == 3 / (2 * SLICE_S)
    assert charts.failures[-1] == 1 / (2 * SLICE_S)
    assert charts.ttft_p50[-1] == pytest.approx(0.15)
    assert charts.tpot_p95[-1] == pytest.approx(0.0295)
    assert charts.ttft_p50[:-1] == [None] * (NUM_SLICES - 1)
    assert not any(charts.events[:-1])


def test_what_is_older_than_the_ring_is_not_shown() -> None:
    history, metrics = History(), Metrics()
    history.record(metrics.totals(), NOW)
    metrics.events += 6
    metrics.of_model("").ttft.observe(0.1)
    for number in range(1, NUM_SLICES + 2):
        history.record(metrics.totals(), NOW + number * SLICE_S)
    charts = history.charts()
    assert not any(charts.events)
    assert set(charts.ttft_p50) == {None}


def test_two_snapshots_at_one_moment_are_one() -> None:
    history, metrics = History(), Metrics()
    for _ in range(2):
        history.record(metrics.totals(), NOW)
        metrics.events += 1
    history.record(metrics.totals(), NOW + SLICE_S)
    assert history.charts().events[-1] == 2 / SLICE_S


BOUNDS = (0.01, 0.1, 1.0, 10.0)


@given(
    st.lists(st.floats(min_value=0.0, max_value=9.9), min_size=1, max_size=50),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_a_quantile_is_within_its_bucket(durations: list[float], share: float) -> None:
    histogram = BucketCounts(BOUNDS)
    for seconds in durations:
        histogram.observe(seconds)
    exact = sorted(durations)[max(1, math.ceil(share * len(durations))) - 1]
    above = next(bound for bound in BOUNDS if exact <= bound)
    below = max(bound for bound in (0.0, *BOUNDS) if bound < above)
    estimate = quantile(BOUNDS, histogram.counts(), share)
    assert estimate is not None and below <= estimate <= above


def test_quantiles_beyond_the_last_bound_and_of_nothing() -> None:
    assert quantile(BOUNDS, [0, 0, 0, 0, 3], 0.5) == 10.0
    assert quantile(BOUNDS, [0, 0, 0, 0, 0], 0.5) is None


def test_requests_that_fail_alike_are_one_entry_described_by_the_last() -> None:
    log = FailureLog()
    log.add(failure(request_id="first"), NOW)
    log.add(failure(status=504, code="agent_timeout"), NOW + 1)
    log.add(failure(request_id="last"), NOW + 2)
    first, second = log.latest()
    assert (first.last.request_id, first.count, first.at) == ("last", 2, NOW + 2)
    assert (second.last.status, second.count) == (504, 1)


def test_logs_are_merged_by_time() -> None:
    """As those of several workers are."""
    log = FailureLog()
    log.add(failure(request_id="here"), NOW + 1)
    elsewhere = failure(request_id="elsewhere")
    other = failure(status=504)
    log.merge(
        [FailureCount(last=elsewhere, count=3, at=NOW), FailureCount(last=other, count=1, at=NOW + 0.5)]
    )
    assert log.latest() == [
        FailureCount(last=failure(request_id="here"), count=4, at=NOW + 1),
        FailureCount(last=other, count=1, at=NOW + 0.5),
    ]


def test_clients_cannot_grow_the_failures() -> None:
    log = FailureLog()
    for number in range(MAX_FAILURES * 3):
        log.add(failure(model=f"unheard-of-{number}"), NOW)
    assert len(log.latest()) == MAX_FAILURES
    assert log.latest()[0].last.model == f"unheard-of-{MAX_FAILURES * 3 - 1}"
