# SPDX-License-Identifier: Apache-2.0
"""The last minutes of traffic: what is charted, and what is forgotten."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.telemetry.history import (
    HOUR_SLICE_S,
    MAX_FAILURES,
    NUM_HOUR_SLICES,
    NUM_SLICES,
    QUANTILE_S,
    SLICE_S,
    Failure,
    FailureCount,
    FailureLog,
    History,
    quantile,
)
from kvferry.proxy.telemetry.metrics import BucketCounts, Metrics, Totals

NOW = 1000.0


def failure(**fields: Any) -> Failure:
    values = {
        "endpoint": "completions",
        "status": 502,
        "code": "lost",
        "model": "m",
        "request_id": "r",
        "message": "",
    }
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


def test_the_slowest_of_a_hundred_are_charted() -> None:
    """D, "/ui": p50 and p95 only, and no time between tokens."""
    history, metrics = History([1.0, 2.0]), Metrics()
    history.record(metrics.totals(), NOW)
    model = metrics.of_model("")
    for histogram in (model.ttft, model.tpot, model.itl):
        for seconds in [0.004] * 97 + [0.9] * 3:
            histogram.observe(seconds)
    history.record(metrics.totals().plus(Totals(pulls=[97, 3, 0])), NOW + SLICE_S)
    charts = history.charts()
    for name, usual in (("ttft", 0.005), ("tpot", 0.005), ("itl", 0.005), ("pull", 1.0)):
        p50, p95, p99 = (getattr(charts, f"{name}_p{percent}")[-1] for percent in (50, 95, 99))
        assert p50 < p95 <= usual < p99, name


def test_what_is_older_than_the_ring_is_not_shown() -> None:
    history, metrics = History(), Metrics()
    history.record(metrics.totals(), NOW)
    metrics.events += 6
    metrics.of_model("").ttft.observe(0.1)
    for number in range(1, NUM_SLICES + 2 + round(QUANTILE_S / SLICE_S)):  # a quantile is a minute's
        history.record(metrics.totals(), NOW + number * SLICE_S)
    charts = history.charts()
    assert not any(charts.events)
    assert set(charts.ttft_p50) == {None}


def test_a_quantile_is_that_of_a_minute() -> None:
    """A rare request is not the p50 of its two seconds, and is forgotten a minute later."""
    history, metrics = History(), Metrics()
    history.record(metrics.totals(), NOW)
    for _ in range(9):
        metrics.of_model("").ttft.observe(0.015)
    history.record(metrics.totals(), NOW + SLICE_S)
    metrics.of_model("").ttft.observe(1.5)
    history.record(metrics.totals(), NOW + 2 * SLICE_S)
    charts = history.charts()
    assert charts.ttft_p50[-1] == pytest.approx(0.0155, rel=0.05)
    assert charts.ttft_p95[-1] is not None and 1.0 <= charts.ttft_p95[-1] <= 2.0
    slices = round(QUANTILE_S / SLICE_S)
    for number in range(3, slices + 2):
        history.record(metrics.totals(), NOW + number * SLICE_S)
    assert history.charts().ttft_p50[-1] == pytest.approx(1.5), "the last minute has only the late one"
    history.record(metrics.totals(), NOW + (slices + 2) * SLICE_S)
    assert history.charts().ttft_p50[-1] is None


def test_an_hour_is_kept_in_longer_slices() -> None:
    history, metrics = History(), Metrics()
    for number in range(4000):  # more than two hours
        history.record(metrics.totals(), NOW + number * SLICE_S)
        metrics.events += 10
    hour = history.hour()
    assert (hour.slice_s, len(hour.events)) == (HOUR_SLICE_S, NUM_HOUR_SLICES)
    assert {round(rate, 6) for rate in hour.events} == {10 / SLICE_S}
    assert len(history.charts().events) == NUM_SLICES


def test_errors_of_clients_are_no_failures_of_servers() -> None:
    history, metrics = History((0.1, 1.0)), Metrics()
    history.record(metrics.totals(), NOW)
    for status in (200, 400, 404, 429, 499, 500, 502):
        metrics.ended("completions", status)
    metrics.retries.labels("prefill").inc()
    metrics.retries.labels("decode").inc()
    metrics.migrations.inc()
    metrics.queue_length.add("", 7)
    agents = Totals(pulls=[0, 4, 0], pull_bytes=4096, recomputes=1, prompt_tokens=100, cached_tokens=25)
    history.record(metrics.totals().plus(agents), NOW + 1.0 * SLICE_S)
    charts = history.charts()
    errors = (charts.client_errors, charts.server_errors, charts.rejected)
    assert [each[-1] * SLICE_S for each in errors] == [2, 2, 1]
    assert [charts.retries[-1] * SLICE_S, charts.migrations[-1] * SLICE_S] == [2, 1]
    assert charts.queued[-1] == 7, "not a rate"
    assert charts.pull_p50[-1] == pytest.approx(0.55)
    assert charts.pull_bytes[-1] == 4096 / SLICE_S
    assert charts.cached[-1] == 0.25
    assert charts.prompt_tokens[-1] == 100 / SLICE_S


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
