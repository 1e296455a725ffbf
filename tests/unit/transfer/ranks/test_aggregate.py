# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.ranks.aggregate import Aggregator, Outcome

OK = Outcome(ok=True, nbytes=10, descriptors=2)
BAD = Outcome(ok=False, reason="peer_lost")
CANCELLED = Outcome(ok=False, reason="cancelled")
WRITING = Outcome(ok=False, reason="deadline", quiescent=False)


def expecting(num_ranks: int) -> Aggregator[str]:
    aggregator: Aggregator[str] = Aggregator(num_ranks)
    aggregator.expect("t")
    return aggregator


def test_the_outcome_comes_once_and_with_the_last_rank() -> None:
    """I6, A8: no rank's report alone decides."""
    aggregator = expecting(3)
    assert aggregator.report("t", 0, OK) is None
    assert aggregator.report("t", 2, OK) is None
    outcome = aggregator.report("t", 1, OK)
    assert outcome is not None
    assert (outcome.ok, outcome.nbytes, outcome.descriptors, outcome.quiescent) == (True, 30, 6, True)
    assert aggregator.report("t", 1, OK) is None


@pytest.mark.parametrize("order", [(OK, BAD), (BAD, OK)])
def test_one_failed_rank_fails_the_whole(order: tuple[Outcome, Outcome]) -> None:
    """X11: not the last status, every status counts."""
    aggregator = expecting(2)
    aggregator.report("t", 0, order[0])
    outcome = aggregator.report("t", 1, order[1])
    assert outcome is not None
    assert (outcome.ok, outcome.reason) == (False, "peer_lost")


def test_the_first_cause_is_named_not_its_consequences() -> None:
    aggregator = expecting(2)
    aggregator.report("t", 0, CANCELLED)
    outcome = aggregator.report("t", 1, BAD)
    assert outcome is not None
    assert outcome.reason == "peer_lost"


def test_a_repeated_report_is_not_another_ranks() -> None:
    """R13: reports are sets by rank, so counting one twice is impossible."""
    aggregator = expecting(2)
    assert aggregator.report("t", 0, OK) is None
    assert aggregator.report("t", 0, OK) is None


def test_a_rank_that_contradicts_itself_has_failed() -> None:
    aggregator = expecting(2)
    aggregator.report("t", 0, OK)
    aggregator.report("t", 0, BAD)
    aggregator.report("t", 0, OK)
    outcome = aggregator.report("t", 1, OK)
    assert outcome is not None
    assert not outcome.ok


def test_a_discarded_key_is_not_kept() -> None:
    aggregator = expecting(2)
    aggregator.report("t", 0, OK)
    aggregator.discard("t")
    aggregator.discard("other")
    assert len(aggregator) == 0
    assert aggregator.report("t", 1, OK) is None


def test_unknown_keys_and_ranks_are_ignored() -> None:
    """X20: an unknown or repeated finish never crashes the engine."""
    aggregator = expecting(1)
    assert aggregator.report("other", 0, OK) is None
    assert aggregator.report("t", 1, OK) is None
    assert aggregator.report("t", -1, OK) is None
    assert not aggregator.quiescent("other", 0)


def test_a_failed_whole_is_quiescent_when_its_last_rank_is() -> None:
    aggregator = expecting(2)
    aggregator.report("t", 0, WRITING)
    outcome = aggregator.report("t", 1, WRITING)
    assert outcome is not None
    assert not outcome.quiescent
    assert not aggregator.quiescent("t", 0)
    assert aggregator.quiescent("t", 1)
    assert not aggregator.quiescent("t", 1)
    assert len(aggregator) == 0


def test_quiescence_before_the_last_report_counts() -> None:
    aggregator = expecting(2)
    aggregator.report("t", 0, WRITING)
    assert not aggregator.quiescent("t", 0)
    outcome = aggregator.report("t", 1, BAD)
    assert outcome is not None
    assert outcome.quiescent


def test_the_memory_of_finished_keys_is_bounded() -> None:
    aggregator: Aggregator[int] = Aggregator(1, max_tombstones=3)
    for key in range(10):
        aggregator.expect(key)
        assert aggregator.report(key, 0, OK) is not None
        assert aggregator.report(key, 0, OK) is None
    assert len(aggregator) == 0
    with pytest.raises(AssertionError):
        aggregator.expect(9)


@given(
    st.integers(1, 4).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks),
            st.lists(
                st.tuples(st.integers(0, ranks - 1), st.sampled_from([OK, BAD, WRITING, CANCELLED])),
                max_size=20,
            ),
        )
    )
)
def test_whatever_is_reported_there_is_at_most_one_outcome_and_it_is_right(
    case: tuple[int, list[tuple[int, Outcome]]],
) -> None:
    """R5, R6: one aggregator, one event; nothing to report gives nothing."""
    ranks, reports = case
    aggregator = expecting(ranks)
    outcomes = []
    seen: dict[int, list[Outcome]] = {}
    for rank, report in reports:
        if not outcomes:
            seen.setdefault(rank, []).append(report)
        outcome = aggregator.report("t", rank, report)
        if outcome is not None:
            outcomes.append(outcome)
    assert len(outcomes) <= 1
    assert bool(outcomes) == (len(seen) == ranks)
    if outcomes:
        assert outcomes[0].ok == all(report.ok for each in seen.values() for report in each)
