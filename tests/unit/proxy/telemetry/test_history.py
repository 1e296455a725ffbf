# SPDX-License-Identifier: Apache-2.0
"""The last minutes of traffic: what lands where, and what is forgotten."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.telemetry.history import MAX_FAILURES, NUM_SLICES, SLICE_S, Failure, History, Spread

NOW = 1000.0 * SLICE_S


def failure(**fields: object) -> Failure:
    values = {"endpoint": "completions", "status": 502, "code": "lost", "model": "m", "request_id": "r"}
    return Failure(**(values | fields))  # type: ignore[arg-type]


def test_a_slice_holds_what_happened_within_it() -> None:
    history = History()
    history.events(6, NOW)
    history.events(4, NOW + SLICE_S * 0.99)
    history.first_text(0.1, NOW)
    history.per_event(0.02, NOW)
    history.ended(NOW)
    history.failed(failure(), NOW)
    history.events(100, NOW + SLICE_S)  # the slice that is not over yet
    charts = history.charts(NOW + SLICE_S)
    assert charts.events[-1] == 10 / SLICE_S
    assert charts.requests[-1] == 2 / SLICE_S
    assert charts.failures[-1] == 1 / SLICE_S
    assert charts.ttft_p50[-1] == pytest.approx(0.1, rel=0.05)
    assert charts.tpot_p95[-1] == pytest.approx(0.02, rel=0.05)
    assert charts.ttft_p50[:-1] == [None] * (NUM_SLICES - 2)
    assert not any(charts.events[:-1])


def test_what_is_older_than_the_ring_is_not_shown_again() -> None:
    """A slot of the ring that nobody has written to since must not pass for the present."""
    history = History()
    history.events(6, NOW)
    history.first_text(0.1, NOW)
    charts = history.charts(NOW + NUM_SLICES * SLICE_S)
    assert not any(charts.events)
    assert set(charts.ttft_p50) == {None}
    history.events(2, NOW + NUM_SLICES * SLICE_S)
    assert history.charts(NOW + (NUM_SLICES + 1) * SLICE_S).events[-1] == 2 / SLICE_S


@given(
    st.lists(st.floats(min_value=2e-4, max_value=1e4), min_size=1, max_size=50),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_a_quantile_is_within_five_percent(durations: list[float], share: float) -> None:
    spread = Spread()
    for seconds in durations:
        spread.add(seconds)
    exact = sorted(durations)[max(1, math.ceil(share * len(durations))) - 1]
    assert spread.quantile(share) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e300])
def test_a_spread_takes_any_duration(seconds: float) -> None:
    spread = Spread()
    spread.add(seconds)
    assert spread.quantile(0.5) is not None
    assert Spread().quantile(0.5) is None


def test_requests_that_fail_alike_are_one_entry_told_by_the_last() -> None:
    history = History()
    history.failed(failure(request_id="first"), NOW)
    history.failed(failure(status=504, code="agent_timeout"), NOW + 1)
    history.failed(failure(request_id="last"), NOW + 2)
    first, second = history.failures()
    assert (first.last.request_id, first.count, first.at) == ("last", 2, NOW + 2)
    assert (second.last.status, second.count) == (504, 1)


def test_clients_cannot_grow_the_failures() -> None:
    history = History()
    for number in range(MAX_FAILURES * 3):
        history.failed(failure(model=f"unheard-of-{number}"), NOW)
    assert len(history.failures()) == MAX_FAILURES
    assert history.failures()[0].last.model == f"unheard-of-{MAX_FAILURES * 3 - 1}"
