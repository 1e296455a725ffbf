# SPDX-License-Identifier: Apache-2.0
"""The producer's leases: who may read which of our blocks, and until when (I1 and I2, docs/architecture.md).

Pure and synchronous: the clock is the argument `now` (seconds, monotonic), every call commits before it
returns, and responses and freed blocks are returned as effects. Once a lease has ended nothing revives it, so
`valid` proves to a reader that the blocks were its own from `ready` until that moment.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvferry.common.state_machine import transition, transitions
from kvferry.transfer.control.messages import MAX_BLOCKS, GoneReason, Grant, Groups
from kvferry.transfer.events import LeaseEndCause
from kvferry.transfer.ids import DuplicateTransfer, Incarnation, TransferId
from kvferry.transfer.plane import MAX_STAGED, BlockRun, all_blocks, one_group
from kvferry.transfer.sampled_tokens import SampledTokens

MAX_ENDED = 8192

_NEVER = float("inf")


class LeaseState(enum.Enum):
    STAGED = "staged"
    """Opened by a reader before the prefill was registered."""
    FILLING = "filling"
    """Registered; the prompt is being computed, and blocks that are may be readable."""
    READY = "ready"
    """The whole prompt is readable and the lease clock runs."""
    RELEASED = "released"
    EXPIRED = "expired"
    DROPPED = "dropped"
    WITHDRAWN = "withdrawn"
    """The request ended early, or with its first tokens: nothing is left to decode."""


LEASE_TRANSITIONS = transitions(
    {
        LeaseState.STAGED: {LeaseState.FILLING, LeaseState.EXPIRED, LeaseState.DROPPED},
        LeaseState.FILLING: {
            LeaseState.READY,
            LeaseState.RELEASED,
            LeaseState.EXPIRED,
            LeaseState.DROPPED,
            LeaseState.WITHDRAWN,
        },
        LeaseState.READY: {
            LeaseState.RELEASED,
            LeaseState.EXPIRED,
            LeaseState.DROPPED,
            LeaseState.WITHDRAWN,
        },
    }
)

_GONE_REASONS: Mapping[LeaseState, GoneReason] = MappingProxyType(
    {
        LeaseState.RELEASED: "finished",
        LeaseState.EXPIRED: "expired",
        LeaseState.DROPPED: "dropped",
        LeaseState.WITHDRAWN: "withdrawn",
    }
)

_CAUSES: Mapping[LeaseState, LeaseEndCause] = MappingProxyType(
    {
        LeaseState.RELEASED: "released",
        LeaseState.EXPIRED: "expired",
        LeaseState.DROPPED: "dropped",
    }
)


@dataclass(frozen=True, slots=True)
class NotYet:
    """Result of an `open`: nothing new within its wait."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Result of an `open`: there is no lease for this reader."""

    reason: GoneReason


@dataclass(frozen=True, slots=True)
class CompleteOpen:
    """Effect: respond to the `open` that `waiter` stands for."""

    waiter: Any
    transfer_id: TransferId
    result: Grant | NotYet | Denied


@dataclass(frozen=True, slots=True)
class Freed:
    """Effect: a registered lease ended, and its blocks may be freed."""

    transfer_id: TransferId
    cause: LeaseEndCause


Effect = CompleteOpen | Freed


@dataclass(slots=True)
class _ParkedOpen:
    waiter: Any
    have: int
    until: float


@dataclass(slots=True)
class _Lease:
    """One live lease. `deadline` is when it ends unless renewed, `limit` when it ends in any case."""

    transfer_id: TransferId
    state: LeaseState
    deadline: float
    limit: float
    block_ids: tuple[int, ...] = ()
    """Of all groups, one after the other."""
    groups: Groups = ()
    readable: int = 0
    checksums: tuple[bytes, ...] = ()
    num_tokens: int = 0
    ids_hash: str = ""
    first_tokens: SampledTokens | None = None
    num_readers: int = 1
    readers: set[Incarnation] = field(default_factory=set)
    proven: set[Incarnation] = field(default_factory=set)
    """Readers that were told that what they read is right; they may not come again."""
    parked: dict[Incarnation, _ParkedOpen] = field(default_factory=dict)

    def transition(self, to: LeaseState) -> None:
        self.state = transition(f"lease {self.transfer_id}", LEASE_TRANSITIONS, self.state, to)

    def may_read(self, consumer: Incarnation) -> bool:
        """Whether the consumer is one of the readers, or may become one."""
        is_open = len(self.readers) < self.num_readers
        return consumer not in self.proven and (is_open or consumer in self.readers)

    def admit(self, consumer: Incarnation, num_readers: int) -> bool:
        """Make the consumer one of `num_readers`, a number that the first sets. Returns whether it is one."""
        if not self.readers:
            self.num_readers = num_readers
        if num_readers != self.num_readers or not self.may_read(consumer):
            return False
        self.readers.add(consumer)
        return True

    def grant(self, have: int, max_blocks: int) -> Grant | None:
        """Return what is new to a reader that has `have` blocks; None if nothing is.

        At most `max_blocks` are granted at once, as if the others were not readable yet.
        """
        ready = self.state is LeaseState.READY
        if not ready and not (self.state is LeaseState.FILLING and self.readable > have):
            return None
        upto = min(self.readable, have + max_blocks)
        whole = ready and upto == self.readable
        return Grant(
            whole,
            have,
            self.block_ids[have:upto],
            self.num_tokens,
            self.ids_hash,
            self.checksums[have:upto],
            self.first_tokens if whole else None,
            self.groups,
        )


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What is remembered of an ended lease. A drop that came before its prefill was never `registered`."""

    state: LeaseState
    proven: frozenset[Incarnation]
    registered: bool


class LeaseTable:
    """Every lease of one producer, and a bounded memory of those that ended."""

    def __init__(
        self,
        lease_s: float,
        *,
        max_blocks: int = MAX_BLOCKS,
        max_staged: int = MAX_STAGED,
        max_ended: int = MAX_ENDED,
    ) -> None:
        self._lease_s = lease_s
        self.max_blocks = max_blocks
        self._max_staged = max_staged
        self._max_ended = max_ended
        self._live: dict[TransferId, _Lease] = {}
        self._ended: OrderedDict[TransferId, _Verdict] = OrderedDict()
        self._num_staged = 0
        self._next_due = _NEVER
        """Before this moment time alone changes nothing; it may be too early, never too late."""

    @property
    def leased(self) -> int:
        """Leases that pin blocks now."""
        return len(self._live) - self._num_staged

    @property
    def open_count(self) -> int:
        """Leases that a reader may still come for, staged ones included."""
        return len(self._live)

    def is_registered(self, transfer_id: TransferId) -> bool:
        """The transfer has a lease that pins blocks."""
        lease = self._live.get(transfer_id)
        return lease is not None and lease.state is not LeaseState.STAGED

    # The scheduler's calls.

    def register(
        self,
        now: float,
        transfer_id: TransferId,
        runs: Sequence[BlockRun],
        num_tokens: int,
        ids_hash: str,
        timeout_s: float,
    ) -> list[Effect]:
        """Begin a lease over a prompt's blocks, none of them readable yet. Raises `DuplicateTransfer`.

        A transfer that was dropped before this call ends at once.
        """
        lease = self._live.get(transfer_id)
        verdict = self._ended.get(transfer_id)
        if (lease and lease.state is not LeaseState.STAGED) or (verdict and verdict.registered):
            raise DuplicateTransfer(transfer_id)
        limit = now + timeout_s
        if lease is None:
            lease = _Lease(transfer_id, LeaseState.FILLING, limit, limit)
            self._live[transfer_id] = lease
        else:
            lease.transition(LeaseState.FILLING)
            self._num_staged -= 1
            lease.deadline = lease.limit = limit
        lease.block_ids = all_blocks(runs)
        if len(runs) > 1 or runs[0].first:
            lease.groups = tuple((run.first, len(run.ids)) for run in runs)
        lease.num_tokens = num_tokens
        lease.ids_hash = ids_hash
        self._note(limit)
        if verdict is not None:
            del self._ended[transfer_id]
            return self._end(lease, LeaseState.DROPPED)
        return []

    def grant_prefix(
        self,
        now: float,
        transfer_id: TransferId,
        consumer: Incarnation,
        block_ids: Sequence[int],
        num_tokens: int,
        ids_hash: str,
        timeout_s: float,
    ) -> list[Effect]:
        """Begin a lease over blocks that are computed already, for the one reader that asked for them.

        Like `register`, after which nothing is readable before `ready`; another reader's early `open` counts
        as a use of the id.
        """
        lease = self._live.get(transfer_id)
        if lease is not None and lease.readers != {consumer}:
            raise DuplicateTransfer(transfer_id)
        effects = self.register(now, transfer_id, one_group(block_ids), num_tokens, ids_hash, timeout_s)
        lease = self._live.get(transfer_id)
        if lease is not None:
            lease.readers.add(consumer)
        return effects

    def advance(
        self, now: float, transfer_id: TransferId, readable: int, checksums: Sequence[bytes] = ()
    ) -> list[Effect]:
        """The first `readable` blocks are computed on every rank. Ignored once the lease has ended.

        With verification, `checksums` are those of the blocks that this call adds.
        """
        lease = self._alive(now, transfer_id)
        if lease is None or lease.state is not LeaseState.FILLING:
            return []
        if not lease.readable <= readable <= len(lease.block_ids):
            raise ValueError(f"{transfer_id}: {readable} readable of {len(lease.block_ids)} blocks")
        lease.readable = readable
        lease.checksums += tuple(checksums)
        return self._complete_parked(lease)

    def set_first_tokens(self, transfer_id: TransferId, first_tokens: SampledTokens | None) -> None:
        """Set what is sent to the reader with the last blocks. Ignored once the lease has ended."""
        lease = self._live.get(transfer_id)
        if lease is not None:
            lease.first_tokens = first_tokens

    def ready(self, now: float, transfer_id: TransferId, checksums: Sequence[bytes] = ()) -> list[Effect]:
        """The whole prompt is computed on every rank; the lease clock starts. Ignored once it has ended."""
        lease = self._alive(now, transfer_id)
        if lease is None:
            return []
        lease.transition(LeaseState.READY)
        lease.readable = len(lease.block_ids)
        lease.checksums += tuple(checksums)
        lease.deadline = self._extended(now, lease)
        self._note(lease.deadline)
        return self._complete_parked(lease)

    def withdraw(self, transfer_id: TransferId) -> list[Effect]:
        """End a lease whose request has ended: nothing is left to decode. Never returns `Freed`."""
        lease = self._live.get(transfer_id)
        if lease is None or lease.state is LeaseState.STAGED:
            return []
        return self._end(lease, LeaseState.WITHDRAWN)

    # A reader's calls.

    def open(
        self,
        now: float,
        transfer_id: TransferId,
        consumer: Incarnation,
        have: int,
        wait_s: float,
        waiter: Any,
        num_readers: int = 1,
    ) -> list[Effect]:
        """Ask for blocks after the first `have`; the first `num_readers` consumers to ask become the readers.

        Counts as a renewal. Comes to exactly one `CompleteOpen` for `waiter`, now or within `wait_s`.
        """
        effects = self.expire(now)
        lease = self._live.get(transfer_id) or self._stage(now, transfer_id)
        if lease is None:
            return [*effects, CompleteOpen(waiter, transfer_id, self._gone(transfer_id))]
        if not lease.admit(consumer, num_readers):
            return [*effects, CompleteOpen(waiter, transfer_id, Denied("finished"))]
        self._renew(now, lease)
        effects += self._supersede(lease, consumer)
        grant = lease.grant(have, self.max_blocks)
        if grant is not None:
            return [*effects, CompleteOpen(waiter, transfer_id, grant)]
        if wait_s <= 0:
            return [*effects, CompleteOpen(waiter, transfer_id, NotYet())]
        lease.parked[consumer] = _ParkedOpen(waiter, have, now + wait_s)
        self._note(now + wait_s)
        return effects

    def renew(
        self, now: float, consumer: Incarnation, transfer_ids: Sequence[TransferId]
    ) -> tuple[list[TransferId], list[TransferId], list[Effect]]:
        """Keep leases for another `lease_s`. Returns those alive, those gone, and effects.

        A transfer that is not known yet is neither: its prefill may still be on its way.
        """
        effects = self.expire(now)
        alive, gone = [], []
        for transfer_id in transfer_ids:
            lease = self._live.get(transfer_id)
            if lease is not None and lease.may_read(consumer):
                self._renew(now, lease)
                alive.append(transfer_id)
            elif lease is not None or transfer_id in self._ended:
                gone.append(transfer_id)
        return alive, gone, effects

    def release(
        self, now: float, transfer_id: TransferId, consumer: Incarnation, read_ok: bool
    ) -> tuple[bool, list[Effect]]:
        """End a lease by its reader. Returns whether what it read is proven right; the same when repeated.

        Proven means: this reader, all its reads done, and the lease alive from `ready` until now. Of several
        readers the last one's release ends it, or the first that is not proven: no one can use the rest.
        """
        effects = self.expire(now)
        lease = self._live.get(transfer_id)
        if lease is None:
            verdict = self._ended.get(transfer_id)
            return verdict is not None and consumer in verdict.proven, effects
        if consumer in lease.proven:
            return True, effects
        if consumer not in lease.readers:
            return False, effects
        if lease.state is LeaseState.STAGED:
            return False, effects + self._end(lease, LeaseState.DROPPED)
        if not read_ok or lease.state is not LeaseState.READY:
            return False, effects + self._end(lease, LeaseState.RELEASED)
        lease.proven.add(consumer)
        if len(lease.proven) < lease.num_readers:
            return True, effects
        return True, effects + self._end(lease, LeaseState.RELEASED)

    def drop(self, now: float, transfer_id: TransferId) -> tuple[bool, list[Effect]]:
        """End a lease that no reader needs. Returns whether this call ended one; idempotent.

        An unknown transfer is remembered, so that a prefill that registers late ends at once.
        """
        effects = self.expire(now)
        lease = self._live.get(transfer_id)
        if lease is None:
            if transfer_id not in self._ended:
                self._remember(transfer_id, _Verdict(LeaseState.DROPPED, frozenset(), registered=False))
            return False, effects
        return True, effects + self._end(lease, LeaseState.DROPPED)

    # Time.

    def expire(self, now: float) -> list[Effect]:
        """End every lease past its deadline, and respond to every `open` whose wait is over.

        Looks at the leases only when something may be due, so that a request costs the same however many
        there are (A5).
        """
        effects: list[Effect] = []
        if now < self._next_due:
            return effects
        for lease in list(self._live.values()):
            if lease.deadline <= now:
                effects += self._end(lease, LeaseState.EXPIRED)
            else:
                for consumer in [each for each, parked in lease.parked.items() if parked.until <= now]:
                    effects += self._supersede(lease, consumer)
        self._next_due = self._first_due()
        return effects

    def next_deadline(self) -> float | None:
        """When to call `expire` next. It may turn out that nothing was due yet."""
        return None if self._next_due == _NEVER else self._next_due

    def check_integrity(self) -> None:
        """Recount everything. Raises AssertionError on an inconsistency."""
        staged = sum(lease.state is LeaseState.STAGED for lease in self._live.values())
        assert staged == self._num_staged <= self._max_staged, "staged count"
        assert len(self._ended) <= self._max_ended, "memory of ended leases"
        assert not self._live.keys() & self._ended.keys(), "live and ended at once"
        assert self._next_due <= self._first_due(), "a deadline without a timer"
        for lease in self._live.values():
            assert LEASE_TRANSITIONS[lease.state], f"{lease.transfer_id} is over but live"
            assert 0 <= lease.readable <= len(lease.block_ids), f"{lease.transfer_id} readable"
            assert lease.deadline <= lease.limit, f"{lease.transfer_id} outlives its request"
            ready = lease.state is LeaseState.READY
            assert not ready or lease.readable == len(lease.block_ids), f"{lease.transfer_id} ready"
            assert len(lease.checksums) in (0, lease.readable), f"{lease.transfer_id} checksums"
            assert len(lease.readers) <= lease.num_readers, f"{lease.transfer_id} readers"
            assert lease.parked.keys() <= lease.readers - lease.proven, f"{lease.transfer_id} parked"
            assert lease.proven <= lease.readers, f"{lease.transfer_id} proven"

    def _note(self, moment: float) -> None:
        self._next_due = min(self._next_due, moment)

    def _first_due(self) -> float:
        times = [lease.deadline for lease in self._live.values()]
        times += [parked.until for lease in self._live.values() for parked in lease.parked.values()]
        return min(times, default=_NEVER)

    def _alive(self, now: float, transfer_id: TransferId) -> _Lease | None:
        """Return the registered lease unless its deadline has passed; `expire` ends it then."""
        lease = self._live.get(transfer_id)
        if lease is None or lease.state is LeaseState.STAGED or lease.deadline <= now:
            return None
        return lease

    def _extended(self, now: float, lease: _Lease) -> float:
        return min(now + self._lease_s, lease.limit)

    def _renew(self, now: float, lease: _Lease) -> None:
        if lease.state is not LeaseState.FILLING:  # while it fills, only the request's own deadline counts
            lease.deadline = max(lease.deadline, self._extended(now, lease))

    def _stage(self, now: float, transfer_id: TransferId) -> _Lease | None:
        if transfer_id in self._ended or self._num_staged >= self._max_staged:
            return None
        lease = _Lease(transfer_id, LeaseState.STAGED, now + self._lease_s, _NEVER)
        self._note(lease.deadline)
        self._live[transfer_id] = lease
        self._num_staged += 1
        return lease

    def _gone(self, transfer_id: TransferId) -> Denied | NotYet:
        verdict = self._ended.get(transfer_id)
        # Neither ended nor staged: the bounded map is full, and the reader has to ask again.
        return NotYet() if verdict is None else Denied(_GONE_REASONS[verdict.state])

    def _complete_parked(self, lease: _Lease) -> list[Effect]:
        effects: list[Effect] = []
        for consumer, parked in list(lease.parked.items()):
            grant = lease.grant(parked.have, self.max_blocks)
            if grant is not None:
                del lease.parked[consumer]
                effects.append(CompleteOpen(parked.waiter, lease.transfer_id, grant))
        return effects

    def _supersede(self, lease: _Lease, consumer: Incarnation) -> list[Effect]:
        """Respond to a parked `open` with nothing new: its wait is over, or the reader asked again."""
        parked = lease.parked.pop(consumer, None)
        return [] if parked is None else [CompleteOpen(parked.waiter, lease.transfer_id, NotYet())]

    def _end(self, lease: _Lease, to: LeaseState) -> list[Effect]:
        staged = lease.state is LeaseState.STAGED
        lease.transition(to)
        del self._live[lease.transfer_id]
        self._num_staged -= staged
        if not self._live:
            self._next_due = _NEVER
        registered = not staged
        # A staged open that ran out says nothing about the prefill, which may still come.
        if registered or to is LeaseState.DROPPED:
            self._remember(lease.transfer_id, _Verdict(to, frozenset(lease.proven), registered))
        reason: GoneReason = "unknown" if staged and to is LeaseState.EXPIRED else _GONE_REASONS[to]
        effects: list[Effect] = [
            CompleteOpen(parked.waiter, lease.transfer_id, Denied(reason)) for parked in lease.parked.values()
        ]
        if registered and to in _CAUSES:
            effects.append(Freed(lease.transfer_id, _CAUSES[to]))
        return effects

    def _remember(self, transfer_id: TransferId, verdict: _Verdict) -> None:
        self._ended[transfer_id] = verdict
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
