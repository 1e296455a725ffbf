# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.transfer.control.messages import Grant
from kvferry.transfer.ids import DuplicateTransfer, Incarnation, TransferId
from kvferry.transfer.plane import BlockRun, one_group
from kvferry.transfer.producer.lease import (
    CompleteOpen,
    Denied,
    Effect,
    Freed,
    LeaseTable,
    NotYet,
)
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens

LEASE_S = 10.0
T = TransferId("t")
READER, STRANGER = Incarnation("reader"), Incarnation("stranger")


def filling(**limits: int) -> LeaseTable:
    table = LeaseTable(LEASE_S, **limits)
    assert table.register(0.0, T, one_group([5, 6, 7]), 40, "hash", 100.0) == []
    return table


def ready() -> LeaseTable:
    table = filling()
    assert table.ready(0.0, T) == []
    return table


def only_result(effects: list[Effect]) -> Grant | NotYet | Denied:
    (effect,) = effects
    assert isinstance(effect, CompleteOpen)
    return effect.result


def open_lease(
    table: LeaseTable,
    now: float,
    have: int = 0,
    wait_s: float = 5.0,
    reader: Incarnation = READER,
    num_readers: int = 1,
) -> Any:
    return table.open(now, T, reader, have, wait_s, "waiter", num_readers)


def test_a_ready_lease_is_granted_whole_and_released_as_valid() -> None:
    table = ready()
    assert only_result(open_lease(table, 1.0)) == Grant(True, 0, (5, 6, 7), 40, "hash")
    assert table.release(2.0, T, READER, True) == (True, [Freed(T, "released")])
    assert table.leased == 0


def read_by_two() -> LeaseTable:
    table = ready()
    for reader in (READER, STRANGER):
        assert isinstance(only_result(open_lease(table, 1.0, reader=reader, num_readers=2)), Grant)
    return table


def test_a_lease_of_two_readers_ends_with_the_second_proof() -> None:
    table = read_by_two()
    assert table.release(2.0, T, READER, True) == (True, [])
    assert table.release(3.0, T, READER, True) == (True, []), "repeated"
    assert only_result(open_lease(table, 3.0, num_readers=2)) == Denied("finished")
    assert table.renew(3.0, READER, [T]) == ([], [T], [])
    assert table.release(4.0, T, STRANGER, True) == (True, [Freed(T, "released")])
    assert [table.release(5.0, T, each, True)[0] for each in (READER, STRANGER)] == [True, True]


def test_a_reader_that_failed_ends_the_lease_of_both() -> None:
    table = read_by_two()
    assert table.release(2.0, T, READER, False) == (False, [Freed(T, "released")])
    assert table.release(2.0, T, STRANGER, True) == (False, [])


def test_the_second_reader_of_a_lease_renews_it_and_it_expires_without() -> None:
    table = read_by_two()
    table.release(2.0, T, READER, True)
    assert table.renew(9.0, STRANGER, [T]) == ([T], [], [])
    assert table.expire(19.0) == [Freed(T, "expired")]
    assert table.release(19.0, T, STRANGER, True) == (False, [])
    assert table.release(19.0, T, READER, True) == (True, []), "what it read was right"


def test_both_readers_may_wait_for_the_prefill_and_a_third_is_denied() -> None:
    table = LeaseTable(LEASE_S)
    assert open_lease(table, 0.0, num_readers=2) == []
    assert open_lease(table, 0.0, reader=STRANGER, num_readers=2) == []
    for third, readers in (("third", 2), ("third", 1)):
        denied = open_lease(table, 0.0, reader=Incarnation(third), num_readers=readers)
        assert only_result(denied) == Denied("finished")
    table.register(1.0, T, one_group([5, 6, 7]), 40, "hash", 100.0)
    grant = Grant(True, 0, (5, 6, 7), 40, "hash")
    assert table.ready(1.0, T) == [CompleteOpen("waiter", T, grant)] * 2
    table.check_integrity()


def lent(reader: Incarnation = READER) -> LeaseTable:
    """Blocks of the prefix cache, leased to `reader` for 20 seconds at most."""
    table = LeaseTable(LEASE_S)
    assert table.grant_prefix(0.0, T, reader, [5, 6], 32, "hash", 20.0) == []
    assert table.ready(0.0, T) == []
    return table


def test_a_loan_is_read_and_released_like_a_prompt() -> None:
    table = lent()
    assert only_result(open_lease(table, 1.0)) == Grant(True, 0, (5, 6), 32, "hash")
    assert table.release(2.0, T, READER, True) == (True, [Freed(T, "released")])
    assert table.leased == 0


def test_a_loan_is_for_the_one_reader_that_asked() -> None:
    table = lent()
    assert only_result(open_lease(table, 1.0, reader=STRANGER)) == Denied("finished")
    assert table.release(1.0, T, STRANGER, True) == (False, [])
    assert table.renew(1.0, STRANGER, [T]) == ([], [T], [])
    assert table.leased == 1


def test_a_loan_that_nobody_opens_or_renews_expires() -> None:
    """I2: its clock runs from the start, and ends with the limit however often it is renewed."""
    assert lent().expire(LEASE_S) == [Freed(T, "expired")]
    table = lent()
    for now in (5.0, 10.0, 15.0):
        assert table.renew(now, READER, [T]) == ([T], [], [])
    assert table.expire(20.0) == [Freed(T, "expired")]
    assert table.release(20.0, T, READER, True) == (False, [])


def test_a_loan_whose_reader_has_given_up_ends_at_once() -> None:
    table = LeaseTable(LEASE_S)
    table.drop(0.0, T)
    assert table.grant_prefix(1.0, T, READER, [5], 16, "hash", 20.0) == [Freed(T, "dropped")]
    assert table.ready(1.0, T) == [] and table.leased == 0


def test_an_id_that_was_used_or_is_waited_for_by_another_is_not_lent() -> None:
    table = lent()
    table.release(1.0, T, READER, True)
    with pytest.raises(DuplicateTransfer):
        table.grant_prefix(2.0, T, READER, [5], 16, "hash", 20.0)
    table = LeaseTable(LEASE_S)
    open_lease(table, 0.0, reader=STRANGER)
    with pytest.raises(DuplicateTransfer):
        table.grant_prefix(1.0, T, READER, [5], 16, "hash", 20.0)
    table.check_integrity()


def test_the_first_tokens_come_with_the_last_blocks_and_not_before() -> None:
    table, first = filling(max_blocks=1), SampledTokens(choices=(SampledToken(id=3),))
    table.advance(0.0, T, 1)
    table.set_first_tokens(T, first)
    assert only_result(open_lease(table, 1.0)).first_tokens is None
    table.ready(2.0, T)
    assert only_result(open_lease(table, 2.0, have=1)).first_tokens is None
    assert only_result(open_lease(table, 2.0, have=2)).first_tokens == first


def test_more_blocks_than_fit_a_response_are_granted_in_turn() -> None:
    """Ready comes with the last of them; each comes with its own checksum."""
    table = filling(max_blocks=2)
    table.advance(0.0, T, 1, (b"5",))
    table.ready(0.0, T, (b"6", b"7"))
    assert only_result(open_lease(table, 1.0)) == Grant(False, 0, (5, 6), 40, "hash", (b"5", b"6"))
    assert only_result(open_lease(table, 1.0, have=2)) == Grant(True, 2, (7,), 40, "hash", (b"7",))


def test_a_repeated_release_gets_the_same_answer_and_frees_once() -> None:
    table = ready()
    open_lease(table, 1.0)
    table.release(2.0, T, READER, True)
    assert table.release(3.0, T, READER, True) == (True, [])
    assert table.release(3.0, T, STRANGER, True) == (False, [])


def test_a_reader_whose_reads_failed_gets_no_proof() -> None:
    table = ready()
    open_lease(table, 1.0)
    assert table.release(2.0, T, READER, False) == (False, [Freed(T, "released")])
    assert table.release(3.0, T, READER, True) == (False, [])


def test_a_release_after_the_deadline_is_invalid_even_if_no_timer_fired() -> None:
    """I1: what the timer would have done is done first."""
    table = ready()
    open_lease(table, 1.0)
    assert table.release(11.0, T, READER, True) == (False, [Freed(T, "expired")])


def test_a_release_before_ready_is_never_valid() -> None:
    table = filling()
    table.advance(0.0, T, 3)
    open_lease(table, 1.0)
    assert table.release(2.0, T, READER, True) == (False, [Freed(T, "released")])


def test_an_unknown_release_is_invalid() -> None:
    assert LeaseTable(LEASE_S).release(0.0, T, READER, True) == (False, [])


def test_a_stranger_neither_releases_nor_reads_a_lease() -> None:
    """X22: an id alone frees no blocks."""
    table = ready()
    open_lease(table, 1.0)
    assert table.release(2.0, T, STRANGER, True) == (False, [])
    assert only_result(open_lease(table, 2.0, reader=STRANGER)) == Denied("finished")
    assert table.renew(2.0, STRANGER, [T]) == ([], [T], [])
    assert table.leased == 1


def test_the_lease_clock_starts_at_ready_and_renewals_extend_it() -> None:
    table = filling()
    assert table.expire(50.0) == []
    table.ready(50.0, T)
    assert table.renew(59.0, READER, [T]) == ([T], [], [])
    assert table.expire(68.9) == []
    assert table.expire(69.0) == [Freed(T, "expired")]


def test_no_renewal_outlives_the_request() -> None:
    table = ready()
    for now in range(1, 100):
        table.renew(float(now), READER, [T])
    assert table.next_deadline() == 100.0
    assert table.expire(100.0) == [Freed(T, "expired")]


def test_a_prefill_that_never_ends_is_given_up_with_its_request() -> None:
    assert filling().expire(100.0) == [Freed(T, "expired")]


def test_an_open_waits_for_more_blocks_than_the_reader_has() -> None:
    table = filling()
    table.advance(0.0, T, 1)
    assert only_result(open_lease(table, 0.0)) == Grant(False, 0, (5,), 40, "hash")
    assert open_lease(table, 0.0, have=1) == []
    assert only_result(table.advance(1.0, T, 2)) == Grant(False, 1, (6,), 40, "hash")
    assert open_lease(table, 1.0, have=2) == []
    assert only_result(table.ready(2.0, T)) == Grant(True, 2, (7,), 40, "hash")


def test_an_open_is_answered_when_its_wait_is_over() -> None:
    table = filling()
    assert open_lease(table, 0.0, wait_s=5.0) == []
    assert table.next_deadline() == 5.0
    assert only_result(table.expire(5.0)) == NotYet()
    assert only_result(open_lease(table, 6.0, wait_s=0.0)) == NotYet()


def test_a_repeated_open_supersedes_the_one_that_waits() -> None:
    """A duplicate on the wire costs nothing, and no request goes without an answer."""
    table = filling()
    assert open_lease(table, 0.0) == []
    assert only_result(open_lease(table, 1.0)) == NotYet()


def test_an_open_before_registration_is_staged_and_settled_by_it() -> None:
    """A3."""
    table = LeaseTable(LEASE_S)
    assert open_lease(table, 0.0) == []
    assert table.leased == 0
    table.register(1.0, T, one_group([5]), 4, "hash", 100.0)
    assert table.renew(1.0, STRANGER, [T])[1] == [T]
    assert only_result(table.ready(2.0, T)) == Grant(True, 0, (5,), 4, "hash")


def test_staged_opens_are_bounded_and_erased() -> None:
    """A4, A6: a full map asks the reader to come again, and every way out erases the entry."""
    table = LeaseTable(LEASE_S, max_staged=2)
    for each in ("a", "b"):
        assert table.open(0.0, TransferId(each), READER, 0, 5.0, each) == []
    assert only_result(table.open(0.0, TransferId("c"), READER, 0, 5.0, "c")) == NotYet()
    table.drop(1.0, TransferId("a"))
    table.register(1.0, TransferId("b"), one_group([1]), 4, "", 100.0)
    for each in ("d", "e"):
        assert table.open(2.0, TransferId(each), READER, 0, 5.0, each) == []
    table.check_integrity()
    table.expire(20.0)
    assert (table.open_count, table.leased) == (1, 1)


def test_a_staged_open_without_a_registration_ends() -> None:
    table = LeaseTable(LEASE_S)
    assert open_lease(table, 0.0, wait_s=60.0) == []
    assert only_result(table.expire(10.0)) == Denied("unknown")
    assert table.open_count == 0


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda table: table.drop(1.0, T), "dropped"),
        (lambda table: table.withdraw(T), "withdrawn"),
        (lambda table: table.expire(100.0), "expired"),
        (lambda table: (open_lease(table, 1.0), table.release(1.0, T, READER, True)), "finished"),
    ],
)
def test_an_ended_lease_is_gone_for_its_reason(end: Any, reason: str) -> None:
    table = ready()
    end(table)
    assert only_result(open_lease(table, 100.0)) == Denied(reason)
    assert table.renew(100.0, READER, [T])[1] == [T]
    assert table.ready(100.0, T) == table.advance(100.0, T, 1) == table.withdraw(T) == []


def test_a_failed_prefill_answers_the_waiting_reader_and_frees_nothing_itself() -> None:
    """The scheduler that calls `fail` has the blocks back already."""
    table = filling()
    open_lease(table, 0.0)
    assert only_result(table.withdraw(T)) == Denied("withdrawn")


def test_a_drop_is_idempotent_and_remembered_for_a_late_prefill() -> None:
    table = LeaseTable(LEASE_S)
    assert table.drop(0.0, T) == (False, [])
    assert table.register(1.0, T, one_group([5]), 4, "hash", 100.0) == [Freed(T, "dropped")]
    with pytest.raises(DuplicateTransfer):
        table.register(2.0, T, one_group([5]), 4, "hash", 100.0)


def test_a_drop_of_a_staged_open_is_remembered_too() -> None:
    table = LeaseTable(LEASE_S)
    open_lease(table, 0.0)
    dropped, effects = table.drop(1.0, T)
    assert dropped
    assert only_result(effects) == Denied("dropped")
    assert table.register(2.0, T, one_group([5]), 4, "hash", 100.0) == [Freed(T, "dropped")]


def test_the_memory_of_ended_leases_is_bounded_and_forgets_towards_invalid() -> None:
    table = LeaseTable(LEASE_S, max_ended=4)
    for number in range(10):
        each = TransferId(str(number))
        table.register(0.0, each, one_group([number]), 4, "", 100.0)
        table.ready(0.0, each)
        table.open(0.0, each, READER, 0, 0.0, None)
        assert table.release(0.0, each, READER, True)[0]
    table.check_integrity()
    assert table.release(1.0, TransferId("9"), READER, True) == (True, [])
    assert table.release(1.0, TransferId("0"), READER, True) == (False, [])


@dataclass
class _Truth:
    """What must be so, kept apart from the table: which blocks are promised, and until when."""

    blocks: list[int]
    limit: float
    ready: bool = False
    until: float = 0.0
    readable: int = 0


def test_leases_that_end_at_the_same_moment_all_end() -> None:
    """L13: nothing is taken out of what is being walked through."""
    table = LeaseTable(LEASE_S)
    ids = [TransferId(f"t{number}") for number in range(4)]
    for each in ids:
        table.register(0.0, each, one_group([1]), 4, "hash", 5.0)
    assert table.expire(5.0) == [Freed(each, "expired") for each in ids]


class Counted(dict[Any, Any]):
    """Notes whether everything in it was looked at."""

    scans = 0

    def values(self) -> Any:
        self.scans += 1
        return super().values()


def test_a_request_costs_the_same_however_many_leases_there_are() -> None:
    """A5: nothing looks through all leases but the timer, once for each time it is due."""
    table = LeaseTable(LEASE_S)
    others = [TransferId(f"t{number}") for number in range(50)]
    for other in others:
        table.register(0.0, other, one_group([1]), 4, "hash", 100.0)
        table.ready(0.0, other)
    table._live = live = Counted(table._live)
    table.register(1.0, T, one_group([5, 6, 7]), 40, "hash", 100.0)
    table.ready(1.0, T)
    open_lease(table, 1.0)
    table.renew(2.0, READER, [T, *others])
    table.release(3.0, T, READER, True)
    assert live.scans == 0
    assert table.next_deadline() == 10.0
    assert table.expire(10.0) == []
    assert live.scans > 0
    assert table.next_deadline() == 12.0, "they were renewed meanwhile"
    table.check_integrity()


def num_readers(transfer_id: TransferId) -> int:
    return 2 if transfer_id in ("t2", "t3") else 1


class Leases(RuleBasedStateMachine):
    """Random schedules of scheduler, readers and time, against an allocator that frees nothing twice.

    The leases t2 and t3 have two readers.
    """

    ids = st.integers(0, 3).map(lambda number: TransferId(f"t{number}"))
    readers = st.sampled_from([READER, STRANGER, Incarnation("third")])

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(LEASE_S, max_staged=2, max_ended=64)
        self.now = 0.0
        self.free = set(range(24))
        self.truth: dict[TransferId, _Truth] = {}
        self.registered: set[TransferId] = set()
        self.proofs: dict[tuple[TransferId, Incarnation], bool] = {}
        self.admitted: dict[TransferId, set[Incarnation]] = {}
        self.asked = 0
        self.answered: set[int] = set()

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Freed):
                self.free_blocks(effect.transfer_id)
            else:
                assert effect.waiter not in self.answered, "answered twice"
                self.answered.add(effect.waiter)
                if isinstance(effect.result, Grant):
                    truth = self.truth[effect.transfer_id]
                    known = effect.result.first_block + len(effect.result.block_ids)
                    assert known <= (len(truth.blocks) if truth.ready else truth.readable)
                    assert truth.ready or not effect.result.ready

    def free_blocks(self, transfer_id: TransferId) -> None:
        truth = self.truth.pop(transfer_id)  # KeyError: freed twice, or never pinned
        assert not self.free & set(truth.blocks)
        self.free |= set(truth.blocks)

    def known_good(self, transfer_id: TransferId) -> bool:
        truth = self.truth.get(transfer_id)
        return truth is not None and self.now < (truth.until if truth.ready else truth.limit)

    @rule(dt=st.sampled_from([0.5, 3.0, 6.0, 11.0]), timer=st.booleans())
    def pass_time(self, dt: float, timer: bool) -> None:
        self.now += dt
        if timer:
            self.apply(self.table.expire(self.now))

    @precondition(lambda self: len(self.free) >= 3)
    @rule(transfer_id=ids, timeout_s=st.sampled_from([5.0, 40.0]))
    def register(self, transfer_id: TransferId, timeout_s: float) -> None:
        if transfer_id in self.registered:
            with pytest.raises(DuplicateTransfer):
                self.table.register(self.now, transfer_id, one_group([0]), 4, "", timeout_s)
            return
        self.registered.add(transfer_id)
        blocks = [self.free.pop() for _ in range(3)]
        self.truth[transfer_id] = _Truth(blocks, self.now + timeout_s)
        self.apply(self.table.register(self.now, transfer_id, one_group(blocks), 12, "", timeout_s))

    @rule(transfer_id=ids)
    def advance(self, transfer_id: TransferId) -> None:
        truth = self.truth.get(transfer_id)
        if truth is not None and truth.readable < 3:
            truth.readable += 1
            self.apply(self.table.advance(self.now, transfer_id, truth.readable))

    @rule(transfer_id=ids)
    def ready(self, transfer_id: TransferId) -> None:
        truth = self.truth.get(transfer_id)
        if truth is None or truth.ready:
            return
        if self.known_good(transfer_id):
            truth.ready = True
            truth.until = min(self.now + LEASE_S, truth.limit)
        self.apply(self.table.ready(self.now, transfer_id))

    @rule(transfer_id=ids)
    def fail(self, transfer_id: TransferId) -> None:
        if transfer_id in self.truth:
            self.free_blocks(transfer_id)
            self.apply(self.table.withdraw(transfer_id))

    @rule(transfer_id=ids)
    def drop(self, transfer_id: TransferId) -> None:
        dropped, effects = self.table.drop(self.now, transfer_id)
        self.apply(effects)
        assert not self.table.drop(self.now, transfer_id)[0]
        assert not dropped or transfer_id not in self.truth

    @rule(transfer_id=ids, reader=readers, have=st.integers(0, 3), wait_s=st.sampled_from([0.0, 2.0]))
    def open(self, transfer_id: TransferId, reader: Incarnation, have: int, wait_s: float) -> None:
        good = self.known_good(transfer_id)
        self.asked += 1
        count = num_readers(transfer_id)
        effects = self.table.open(self.now, transfer_id, reader, have, wait_s, self.asked, count)
        self.apply(effects)
        mine = [
            effect for effect in effects if isinstance(effect, CompleteOpen) and effect.waiter == self.asked
        ]
        if mine and isinstance(mine[0].result, Denied):
            return
        self.admitted.setdefault(transfer_id, set()).add(reader)
        truth = self.truth.get(transfer_id)
        if truth is not None:
            assert good
            truth.until = max(truth.until, min(self.now + LEASE_S, truth.limit))

    @rule(transfer_id=ids, reader=readers)
    def renew(self, transfer_id: TransferId, reader: Incarnation) -> None:
        truth = self.truth.get(transfer_id)
        good = self.known_good(transfer_id)
        alive, _, effects = self.table.renew(self.now, reader, [transfer_id])
        self.apply(effects)
        if truth is not None and transfer_id in alive:
            assert good
            truth.until = max(truth.until, min(self.now + LEASE_S, truth.limit))

    @rule(transfer_id=ids, reader=readers, read_ok=st.booleans())
    def release(self, transfer_id: TransferId, reader: Incarnation, read_ok: bool) -> None:
        truth = self.truth.get(transfer_id)
        good = self.known_good(transfer_id)
        valid, effects = self.table.release(self.now, transfer_id, reader, read_ok)
        self.apply(effects)
        proof = self.proofs.get((transfer_id, reader))
        if valid and not proof:
            assert read_ok and good and truth is not None and truth.ready, "proof without a live lease (I1)"
            assert reader in self.admitted[transfer_id]
            proven = [proof for (proven_id, _), proof in self.proofs.items() if proven_id == transfer_id]
            assert sum(proven) < num_readers(transfer_id) and all(proven), "one more, or after a failure"
        if proof is not None and (proof or truth is None):
            assert valid == proof, "a repeated release had another result"
        if valid or (truth is not None and transfer_id not in self.truth):
            self.proofs[transfer_id, reader] = valid

    @invariant()
    def only_live_leases_pin_blocks(self) -> None:
        self.table.check_integrity()
        assert self.table.leased == len(self.truth), "a pinned block without a lease, or the reverse (I2)"
        assert len(self.free) + 3 * len(self.truth) == 24

    def teardown(self) -> None:
        self.apply(self.table.expire(self.now + 1000.0))
        assert len(self.free) == 24, "a block never came back (I2)"
        assert len(self.answered) == self.asked, "an open was never answered"


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_groups_are_leased_one_after_the_other() -> None:
    table = LeaseTable(10.0, max_blocks=2)
    table.register(0.0, T, (BlockRun(0, (5, 6)), BlockRun(1, (9,))), 40, "hash", 100.0)
    table.ready(1.0, T)
    (first,) = table.open(1.0, T, READER, 0, 0.0, "w")
    (rest,) = table.open(1.0, T, READER, 2, 0.0, "w")
    grants = [each.result for each in (first, rest) if isinstance(each, CompleteOpen)]
    assert [(each.ready, each.block_ids) for each in grants if isinstance(each, Grant)] == [
        (False, (5, 6)),
        (True, (9,)),
    ]
    assert {each.groups for each in grants if isinstance(each, Grant)} == {((0, 2), (1, 1))}


def test_one_group_from_the_beginning_needs_no_words() -> None:
    table = LeaseTable(10.0)
    table.register(0.0, T, one_group([5, 6]), 40, "hash", 100.0)
    table.ready(1.0, T)
    (opened,) = table.open(1.0, T, READER, 0, 0.0, "w")
    assert (
        isinstance(opened, CompleteOpen) and isinstance(opened.result, Grant) and opened.result.groups == ()
    )
