# SPDX-License-Identifier: Apache-2.0
"""When a pair is taken out of rotation, and when it comes back."""

from __future__ import annotations

import pytest

from kvferry.proxy.canary.pair_record import LEAST_RIGHT, MEMORY, PairRecord, PairTrust


def states(record: PairRecord, answers: str) -> list[PairTrust]:
    """The state after each probe: `=` for an answer that is as the reference's, `x` for one that differs."""
    found = []
    for each in answers:
        before = record.state
        assert record.note(is_same=each == "=") == (record.state is not before)
        found.append(record.state)
    return found


def test_one_difference_takes_nobody_out() -> None:
    record = PairRecord("p → d")
    assert states(record, "==x==") == [*[PairTrust.TRUSTED] * 2, *[PairTrust.SUSPECT] * 3]
    assert (record.probes, record.different) == (5, 1)


def test_two_differences_take_it_out() -> None:
    assert states(PairRecord("p → d"), "x=x")[-1] is PairTrust.OUT


def test_a_difference_is_forgotten_in_the_end() -> None:
    record = PairRecord("p → d")
    assert states(record, "x" + "=" * (MEMORY - 1))[-1] is PairTrust.SUSPECT
    assert states(record, "=x")[:] == [PairTrust.TRUSTED, PairTrust.SUSPECT]


@pytest.mark.parametrize(("between", "needed"), [(0, LEAST_RIGHT), (3, LEAST_RIGHT), (50, 150)])
def test_a_pair_comes_back_after_three_times_as_many_right_answers(between: int, needed: int) -> None:
    record = PairRecord("p → d")
    states(record, "x" + "=" * between + "x")
    assert states(record, "=" * (needed - 1))[-1] is PairTrust.OUT
    assert states(record, "x" + "=" * (needed - 1))[-1] is PairTrust.OUT, "a wrong one begins it again"
    assert states(record, "=") == [PairTrust.TRUSTED]
