# SPDX-License-Identifier: Apache-2.0
"""Retries stay a tenth of the requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.exchange.exchange import MAX_SAVED, RATIO, RESERVE, RetryBudget


@given(st.lists(st.booleans(), max_size=2000))
def test_retries_never_exceed_the_reserve_and_a_tenth_of_the_requests(requests: list[bool]) -> None:
    budget, made = RetryBudget(), 0
    for is_request in requests:
        if is_request:
            budget.deposit()
        else:
            made += budget.try_withdraw()
        assert made <= RESERVE + RATIO * sum(requests) + 1e-6


def test_an_outage_is_not_retried_for_ever_and_requests_earn_retries_again() -> None:
    budget = RetryBudget()
    assert sum(budget.try_withdraw() for _ in range(1000)) == RESERVE
    for _ in range(11):
        budget.deposit()
    assert budget.try_withdraw() and not budget.try_withdraw()


def test_calm_times_save_up_a_bounded_number() -> None:
    budget = RetryBudget()
    for _ in range(20000):
        budget.deposit()
    assert sum(budget.try_withdraw() for _ in range(5000)) == MAX_SAVED
