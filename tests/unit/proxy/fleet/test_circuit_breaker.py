# SPDX-License-Identifier: Apache-2.0
"""The breaker's table, row by row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.fleet.circuit_breaker import (
    MAX_PAUSE_S,
    PROBE_INTERVAL_S,
    Breaker,
    BreakerSettings,
    BreakerState,
)
from kvferry.proxy.wire.registration import Incarnation

SETTINGS = BreakerSettings(failures=3, pause_s=1.0)
CLOSED, OPEN, HALF_OPEN = BreakerState


def breaker(state: BreakerState) -> Breaker:
    """A breaker brought to `state` at time 0; the first probe of an open one is due at 1."""
    made = Breaker(Incarnation("a"), SETTINGS)
    if state is not CLOSED:
        for _ in range(SETTINGS.failures):
            made.failed(0.0 if state is OPEN else -1.0)
    if state is HALF_OPEN:
        made.sent(0.0)
    assert made.state is state
    return made


def happen(made: Breaker, event: str, now: float) -> None:
    match event:
        case "succeeded":
            made.succeeded()
        case "failed":
            made.failed(now)
        case "sent":
            made.sent(now)


TABLE = {
    (CLOSED, "succeeded"): CLOSED, (CLOSED, "failed"): CLOSED, (CLOSED, "sent"): CLOSED,
    (OPEN, "succeeded"): OPEN, (OPEN, "failed"): OPEN, (OPEN, "sent"): HALF_OPEN,
    (HALF_OPEN, "succeeded"): CLOSED, (HALF_OPEN, "failed"): OPEN, (HALF_OPEN, "sent"): HALF_OPEN,
}  # fmt: skip


@pytest.mark.parametrize(("state", "event"), list(TABLE))
def test_the_table(state: BreakerState, event: str) -> None:
    made = breaker(state)
    happen(made, event, now=1.0)
    assert made.state is TABLE[state, event]


def test_only_failures_in_a_row_open_it() -> None:
    made = breaker(CLOSED)
    for _ in range(5):
        made.failed(0.0)
        made.failed(0.0)
        made.succeeded()
    assert made.state is CLOSED and made.allows(0.0)
    for _ in range(3):
        made.failed(0.0)
    assert made.state is OPEN and not made.allows(0.99) and made.allows(1.0)


def test_half_open_lets_one_attempt_through_at_a_time() -> None:
    made = breaker(HALF_OPEN)
    assert not made.allows(PROBE_INTERVAL_S - 0.01)
    assert made.allows(PROBE_INTERVAL_S), "a probe that says nothing does not block the next"
    made.succeeded()
    assert made.allows(0.0)


def test_each_failed_probe_doubles_the_pause_up_to_a_bound_and_success_resets_it() -> None:
    made, now, pauses = breaker(OPEN), 0.0, []
    for _ in range(8):
        due = next(step for step in range(1, 100) if made.allows(now + step))
        pauses.append(due)
        now += due
        made.sent(now)
        made.failed(now)
    assert pauses == [1, 2, 4, 8, 16, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    made.sent(now + MAX_PAUSE_S)
    made.succeeded()
    for _ in range(3):
        made.failed(100.0)
    assert made.allows(101.0)


@given(st.lists(st.sampled_from(["succeeded", "failed", "sent", "later"]), max_size=60))
def test_an_agent_is_never_shut_out_for_longer_than_the_bound(events: list[str]) -> None:
    made, now = Breaker(Incarnation("a"), SETTINGS), 0.0
    for event in events:
        if event == "later":
            now += 0.7
        elif event != "sent" or made.allows(now):
            happen(made, event, now)
        assert made.allows(now + MAX_PAUSE_S)
