# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.consumer.pull import (
    MAX_ATTEMPTS,
    ClearBlocks,
    Emit,
    EnsureLink,
    GroupRead,
    Pull,
    PullState,
    ReadBlocks,
    SendDrop,
    SendLend,
    SendOpen,
    SendRelease,
    Verify,
)
from kvferry.transfer.control.messages import Grant
from kvferry.transfer.events import PullDone, PullFailed, PullQuiescent, RankRead
from kvferry.transfer.ids import TransferId
from kvferry.transfer.plane import BlockRun, one_group
from kvferry.transfer.ranks.aggregate import Outcome
from kvferry.transfer.ranks.messages import CancelRead
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens

OURS = (10, 11, 12)
GOOD = Outcome(ok=True, reason="", quiescent=True, nbytes=100, descriptors=3)
BAD = Outcome(ok=False, reason="peer_lost", quiescent=True, nbytes=0, descriptors=0)
WRITING = Outcome(ok=False, reason="deadline", quiescent=False, nbytes=0, descriptors=0)


def grant(ids: tuple[int, ...], *, first: int = 0, ready: bool = True, tokens: int = 40) -> Grant:
    return Grant(ready, first, ids, tokens, "hash")


def reads(seq: int, local: tuple[int, ...], remote: tuple[int, ...]) -> ReadBlocks:
    """At an engine with one group."""
    return ReadBlocks(seq, (GroupRead(0, local, remote),))


def opening(first_block: int = 0) -> Pull:
    pull = Pull(TransferId("t"), 40)
    assert pull.start(1.0, one_group(OURS, first_block), None) == [EnsureLink()]
    assert pull.connected("tcp") == [SendOpen(0)]
    return pull


def reading() -> Pull:
    pull = opening()
    assert pull.opened(2.0, grant((3, 4, 5))) == [reads(0, OURS, (3, 4, 5))]
    return pull


def events(effects: list[Any]) -> list[Any]:
    return [effect.event for effect in effects if isinstance(effect, Emit)]


def failure(effects: list[Any]) -> PullFailed:
    (event,) = events(effects)
    assert isinstance(event, PullFailed)
    return event


def test_decoding_may_start_only_after_the_producers_proof() -> None:
    """I1: all bytes here is not enough."""
    pull = reading()
    assert pull.read_ended(0, GOOD) == [SendRelease(read_ok=True)]
    (done,) = events(pull.released(5.0, True))
    assert done == PullDone(
        transfer_id="t",
        backend="tcp",
        nbytes=100,
        descriptors=3,
        wait_s=1.0,
        pull_s=3.0,
        tail_s=3.0,
        num_blocks=3,
        began_at=2.0,
    )
    assert pull.over


def rank_read(rank: int, began_at: float, ended_at: float) -> RankRead:
    return RankRead(rank=rank, began_at=began_at, ended_at=ended_at, nbytes=10, descriptors=1)


def test_what_each_rank_read_is_told_from_its_first_read_to_its_last() -> None:
    pull = opening()
    pull.opened(2.0, grant((3, 4), ready=False))
    pull.opened(2.5, grant((5,), first=2))
    assert pull.read_ended(1, Outcome(ok=True, reads=(rank_read(1, 2.6, 2.7), rank_read(0, 2.6, 3.9)))) == []
    pull.read_ended(0, Outcome(ok=True, reads=(rank_read(0, 2.1, 2.9), rank_read(1, 2.2, 3.0))))
    (done,) = events(pull.released(5.0, True))
    assert done.rank_reads == (
        RankRead(rank=0, began_at=2.1, ended_at=3.9, nbytes=20, descriptors=2),
        RankRead(rank=1, began_at=2.2, ended_at=3.0, nbytes=20, descriptors=2),
    )


HASHES = (b"first", b"second", b"third")


def asking() -> Pull:
    pull = Pull(TransferId("t"), 48)
    assert pull.start_prefix(1.0, OURS, HASHES, 16) == [EnsureLink()]
    assert pull.connected("tcp") == [SendLend(HASHES)]
    return pull


def borrowed(num_blocks: int, ids: tuple[int, ...], **changes: Any) -> Grant:
    """What opens a loan of so many blocks."""
    whole = Grant(True, 0, ids, 16 * num_blocks, HASHES[num_blocks - 1].hex())
    return replace(whole, **changes)


def test_of_a_borrowed_prefix_the_blocks_that_the_peer_has_are_read_and_proven() -> None:
    pull = asking()
    assert pull.lent(2.0, 2) == [SendOpen(0)]
    assert pull.opened(3.0, borrowed(2, (7, 8))) == [reads(0, OURS[:2], (7, 8))]
    assert pull.read_ended(0, GOOD) == [SendRelease(read_ok=True)]
    (done,) = events(pull.released(5.0, True))
    assert isinstance(done, PullDone)
    assert (done.num_blocks, done.nbytes) == (2, 100)
    assert pull.over


def test_a_borrowed_prefix_without_proof_is_thrown_away() -> None:
    pull = asking()
    pull.lent(2.0, 3)
    pull.opened(3.0, borrowed(3, (7, 8, 9)))
    pull.read_ended(0, GOOD)
    assert failure(pull.released(5.0, False)).reason == "invalid"


def test_a_peer_without_any_of_the_blocks_is_no_failure() -> None:
    pull = asking()
    (done,) = events(pull.lent(2.0, 0))
    assert isinstance(done, PullDone)
    assert (done.num_blocks, done.nbytes) == (0, 0)
    assert pull.over


@pytest.mark.parametrize(
    "other",
    [
        {"ids_hash": HASHES[2].hex()},
        {"ids_hash": b"another".hex()},
        {"num_tokens": 48},
        {"block_ids": (7, 8, 9)},
        {"block_ids": (7,)},
    ],
)
def test_a_loan_of_something_else_is_not_read(other: dict[str, Any]) -> None:
    """I1: of another prompt, another salt, or of more or fewer blocks than were announced."""
    pull = asking()
    pull.lent(2.0, 2)
    effects = pull.opened(3.0, borrowed(2, (7, 8), **other))
    assert not any(isinstance(effect, ReadBlocks) for effect in effects)
    assert failure(effects).reason == "mismatch"


def test_more_blocks_than_were_asked_for_are_refused() -> None:
    pull = asking()
    effects = pull.lent(2.0, 4)
    assert effects[0] == SendDrop() and failure(effects).reason == "mismatch"


def test_a_loan_that_is_given_up_is_dropped_at_the_peer() -> None:
    """I2: what it leases us too late ends at once."""
    for end in ("unanswered", "cancelled"):
        pull = asking()
        effects = pull.unanswered() if end == "unanswered" else pull.fail("cancelled")
        assert effects[0] == SendDrop()
        failed = failure(effects)
        assert failed.quiescent and failed.reason == ("unreachable" if end == "unanswered" else end)
        assert pull.over and pull.lent(3.0, 2) == []


def test_a_borrowing_needs_a_hash_for_each_block() -> None:
    for blocks, hashes in ((OURS, HASHES[:2]), ((), ())):
        with pytest.raises(ValueError, match="hashes"):
            Pull(TransferId("t"), 48).start_prefix(1.0, blocks, hashes, 16)


def test_without_the_proof_the_bytes_are_thrown_away() -> None:
    pull = reading()
    pull.read_ended(0, GOOD)
    assert failure(pull.released(5.0, False)).reason == "invalid"


def test_chunks_are_read_as_they_come_and_the_proof_is_asked_for_after_the_last() -> None:
    pull = opening()
    assert pull.opened(2.0, grant((3,), ready=False)) == [reads(0, (10,), (3,)), SendOpen(1)]
    assert pull.pending() == [SendOpen(1)]
    assert pull.opened(3.0, grant((4, 5), first=1)) == [reads(1, (11, 12), (4, 5))]
    assert pull.read_ended(1, GOOD) == []
    assert pull.read_ended(0, GOOD) == [SendRelease(read_ok=True)]


def test_blocks_that_were_here_before_the_prefill_ended_are_counted() -> None:
    """Only what is left then is waited for by anybody."""
    pull = opening()
    pull.opened(2.0, grant((3,), ready=False))
    pull.read_ended(0, GOOD)
    pull.opened(3.0, grant((4,), first=1, ready=False))
    pull.opened(6.0, grant((5,), first=2))
    pull.read_ended(1, GOOD)
    pull.read_ended(2, GOOD)
    (done,) = events(pull.released(7.0, True))
    assert (done.early_blocks, done.tail_s, done.pull_s) == (1, 1.0, 5.0)


@pytest.mark.parametrize("valid", [True, False])
def test_the_first_tokens_are_passed_on_even_if_the_kv_is_lost(valid: bool) -> None:
    pull, first = opening(), SampledTokens(choices=(SampledToken(id=9),), cached_tokens=16)
    pull.opened(2.0, replace(grant((3, 4, 5)), first_tokens=first))
    pull.read_ended(0, GOOD)
    (end,) = events(pull.released(3.0, valid))
    assert end.first_tokens == first


def test_a_chunk_that_arrives_early_does_not_end_the_pull() -> None:
    pull = opening()
    pull.opened(2.0, grant((3,), ready=False))
    assert pull.read_ended(0, GOOD) == []
    assert pull.state is PullState.OPENING


def test_cached_blocks_are_skipped() -> None:
    assert opening(2).opened(2.0, grant((3, 4, 5))) == [reads(0, (12,), (5,))]
    assert opening(3).opened(2.0, grant((3, 4, 5))) == [SendRelease(read_ok=True)]


@pytest.mark.parametrize(
    "answer",
    [
        grant((3, 4)),
        grant((3, 4, 5, 6)),
        grant((3, 4, 5), first=1),
        grant((3, 4, 5), tokens=41),
    ],
)
def test_an_answer_about_another_prompt_fails_the_pull(answer: Grant) -> None:
    """X24: counts are compared before anything is read."""
    pull = opening()
    effects = pull.opened(2.0, answer)
    assert failure(effects).reason == "mismatch"
    assert SendRelease(read_ok=False) in effects
    assert not any(isinstance(effect, ReadBlocks) for effect in effects)


def test_one_failed_read_fails_the_pull_and_cancels_the_others() -> None:
    pull = opening()
    pull.opened(2.0, grant((3,), ready=False))
    pull.opened(3.0, grant((4, 5), first=1))
    effects = pull.read_ended(0, BAD)
    assert CancelRead(transfer_id="t", seq=1) in effects
    assert SendRelease(read_ok=False) in effects
    assert failure(effects) == PullFailed(
        transfer_id="t", reason="read_failed", quiescent=False, detail="peer_lost", backend="tcp"
    )
    assert not pull.over
    assert events(pull.read_ended(1, GOOD)) == [PullQuiescent(transfer_id="t")]
    assert pull.over


def test_blocks_stay_quarantined_until_the_last_read_is_quiescent() -> None:
    """I3: a cancel does not stop what is in flight."""
    pull = reading()
    assert not failure(pull.fail("cancelled")).quiescent
    assert pull.read_ended(0, WRITING) == []
    assert not pull.over
    assert events(pull.read_quiescent(0)) == [PullQuiescent(transfer_id="t")]
    assert pull.read_quiescent(0) == []


def test_an_unanswered_request_is_repeated_and_then_the_producer_is_unreachable() -> None:
    for pull, again in ((opening(), SendOpen(0)), (reading(), SendRelease(read_ok=True))):
        pull.read_ended(0, GOOD)
        for _ in range(MAX_ATTEMPTS - 1):
            assert pull.unanswered() == [again]
        assert failure(pull.unanswered()).reason == "unreachable"


def test_a_late_verdict_of_a_renewal_does_not_overrule_the_release() -> None:
    pull = reading()
    pull.read_ended(0, GOOD)
    assert pull.gone("gone") == []
    assert events(pull.released(5.0, True))


def test_a_hold_ends_without_an_event() -> None:
    pull = Pull(TransferId("t"), 40)
    assert pull.fail("deadline") == [SendDrop()]
    assert pull.over


def test_a_pull_that_never_opened_drops_the_lease() -> None:
    pull = Pull(TransferId("t"), 40)
    pull.start(1.0, one_group(OURS), None)
    effects = pull.fail("cancelled")
    assert effects[0] == SendDrop()
    assert failure(effects).quiescent


INPUTS = st.sampled_from(
    [
        lambda pull, seq: pull.connected("tcp"),
        lambda pull, seq: pull.opened(2.0, grant((3,), ready=False)),
        lambda pull, seq: pull.opened(2.0, grant((4, 5), first=1)),
        lambda pull, seq: pull.opened(2.0, grant((3, 4, 5))),
        lambda pull, seq: pull.pending(),
        lambda pull, seq: pull.gone("expired"),
        lambda pull, seq: pull.read_ended(seq, GOOD),
        lambda pull, seq: pull.read_ended(seq, BAD),
        lambda pull, seq: pull.read_ended(seq, WRITING),
        lambda pull, seq: pull.read_quiescent(seq),
        lambda pull, seq: pull.released(4.0, True),
        lambda pull, seq: pull.released(4.0, False),
        lambda pull, seq: pull.unanswered(),
        lambda pull, seq: pull.fail("cancelled"),
        lambda pull, seq: pull.lost("unreachable"),
    ]
)


@given(st.lists(st.tuples(INPUTS, st.integers(0, 2)), max_size=30))
def test_in_any_order_of_events_there_is_one_end_and_it_is_honest(history: list[tuple[Any, int]]) -> None:
    """X15, X20: late, repeated and unknown events change nothing."""
    pull = opening()
    emitted: list[Any] = []
    asked_for_proof = False
    for step, seq in history:
        was = pull.state
        effects = step(pull, seq)
        emitted += events(effects)
        if effects and SendRelease(read_ok=True) in effects:
            asked_for_proof = True
        if pull.state is PullState.DONE and was is not PullState.DONE:
            assert asked_for_proof
            assert was is PullState.RELEASING
    ends = [event for event in emitted if not isinstance(event, PullQuiescent)]
    assert len(ends) <= 1
    assert bool(ends) == (not pull.live)
    quiescent = [event for event in emitted if isinstance(event, PullQuiescent)]
    assert len(quiescent) <= 1
    if quiescent:
        assert isinstance(ends[0], PullFailed)
        assert not ends[0].quiescent


def verifying() -> Pull:
    """Both chunks have been read."""
    pull = Pull(TransferId("t"), 40, verify=True)
    pull.start(1.0, one_group(OURS, 1), None)
    pull.connected("tcp")
    pull.opened(2.0, Grant(False, 0, (3, 4), 40, "hash", (b"3", b"4")))
    pull.opened(2.0, Grant(True, 2, (5,), 40, "hash", (b"5",)))
    assert pull.read_ended(0, GOOD) == []
    assert pull.read_ended(1, GOOD) == [Verify(((11, 12),), (b"4", b"5"))]
    return pull


def test_what_was_read_is_verified_before_the_proof_is_asked_for() -> None:
    pull = verifying()
    assert pull.live
    assert pull.verified("") == [SendRelease(read_ok=True)]
    (done,) = events(pull.released(5.0, True))
    assert isinstance(done, PullDone)


def test_what_differs_from_its_checksums_is_thrown_away() -> None:
    pull = verifying()
    assert pull.verified("one slice differs") == [ClearBlocks(((11, 12),))]
    effects = pull.cleared()
    assert effects[0] == SendRelease(read_ok=False)
    failed = failure(effects)
    assert (failed.reason, failed.detail, failed.quiescent) == ("checksum", "one slice differs", True)
    assert pull.verified("") == [] and pull.over


def test_a_pull_that_ends_while_it_verifies_does_not_wait_for_the_sums() -> None:
    pull = verifying()
    assert failure(pull.fail("deadline")).reason == "deadline"
    assert pull.verified("") == []


@pytest.mark.parametrize("end", ["fail", "lost"])
def test_blocks_that_are_being_cleared_are_given_back_when_they_are(end: str) -> None:
    """I3: the ranks still write zeros over them."""
    pull = verifying()
    pull.verified("one slice differs")
    failed = failure(getattr(pull, end)("deadline"))
    assert (failed.reason, failed.quiescent, pull.over) == ("deadline", False, False)
    assert pull.cleared() == [Emit(PullQuiescent(transfer_id="t"))] and pull.over


def test_blocks_without_checksums_are_not_taken_where_they_are_wanted() -> None:
    pull = Pull(TransferId("t"), 40, verify=True)
    pull.start(1.0, one_group(OURS), None)
    pull.connected("tcp")
    assert failure(pull.opened(2.0, Grant(True, 0, (3, 4, 5), 40, "hash", (b"3",)))).reason == "mismatch"


def test_a_full_hit_has_nothing_to_verify() -> None:
    pull = Pull(TransferId("t"), 40, verify=True)
    pull.start(1.0, one_group(OURS, 3), None)
    pull.connected("tcp")
    assert pull.opened(2.0, Grant(True, 0, (3, 4, 5), 40, "hash", (b"3", b"4", b"5"))) == [
        SendRelease(read_ok=True)
    ]


GROUPS = (BlockRun(1, (10, 11)), BlockRun(2, (20,)), BlockRun(3, ()), BlockRun(2, (30,)))
"""Of a prompt of three blocks: its first is cached for the first group, two are outside of the second's
window, the third keeps nothing of it, and of the last one state is left.
"""
LEASED = ((0, 3), (1, 2), (3, 0), (2, 1))
THEIR_BLOCKS = (3, 4, 5, 6, 7, 8)


def opening_groups() -> Pull:
    pull = Pull(TransferId("t"), 48)
    pull.start(1.0, GROUPS, None)
    pull.connected("tcp")
    return pull


def leased(
    block_ids: tuple[int, ...],
    groups: tuple[tuple[int, int], ...] = LEASED,
    *,
    first: int = 0,
    ready: bool = True,
) -> Grant:
    return Grant(ready, first, block_ids, 48, "hash", groups=groups)


def test_each_group_gets_what_it_misses() -> None:
    assert opening_groups().opened(2.0, leased(THEIR_BLOCKS)) == [
        ReadBlocks(0, (GroupRead(0, (10, 11), (4, 5)), GroupRead(1, (20,), (7,)), GroupRead(3, (30,), (8,))))
    ]


@pytest.mark.parametrize("cut", range(1, len(THEIR_BLOCKS)))
def test_a_grant_may_end_anywhere_in_a_group(cut: int) -> None:
    pull = opening_groups()
    effects = pull.opened(2.0, leased(THEIR_BLOCKS[:cut], ready=False))
    effects += pull.opened(3.0, leased(THEIR_BLOCKS[cut:], first=cut))
    read: dict[int, int] = {}
    for effect in effects:
        for group in effect.groups if isinstance(effect, ReadBlocks) else ():
            read |= dict(zip(group.local_blocks, group.remote_blocks, strict=True))
    assert read == {10: 4, 11: 5, 20: 7, 30: 8}


@pytest.mark.parametrize(
    ("groups", "detail"),
    [
        (((2, 1), (1, 2), (3, 0), (2, 1)), "a hole: group 0 has blocks 2 to 3, not 1 to 3"),
        (((0, 3), (3, 0), (3, 0), (2, 1)), "a hole: group 1 has blocks 3 to 3, not 2 to 3"),
        (((0, 3), (1, 2), (3, 0), (1, 1)), "a hole: group 3 has blocks 1 to 2, not 2 to 3"),
        (((0, 3), (1, 2), (3, 0)), "3 groups of blocks, expected 4"),
        ((), "1 groups of blocks, expected 4"),
        (((0, 3), (1, 2), (3, 0), (2, 2)), "a hole: group 3 has blocks 2 to 4, not 2 to 3"),
    ],
)
def test_a_hole_is_refused_before_the_first_read(groups: tuple[tuple[int, int], ...], detail: str) -> None:
    effects = opening_groups().opened(2.0, leased(THEIR_BLOCKS, groups))
    assert not any(isinstance(effect, ReadBlocks) for effect in effects)
    assert (failure(effects).reason, failure(effects).detail) == ("mismatch", detail)


def test_groups_may_not_change_between_grants() -> None:
    pull = opening_groups()
    pull.opened(2.0, leased(THEIR_BLOCKS[:2], ready=False))
    effects = pull.opened(3.0, leased(THEIR_BLOCKS[2:], ((0, 3), (0, 3), (3, 0), (2, 1)), first=2))
    assert failure(effects).detail == "other groups than before"
