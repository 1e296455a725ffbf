# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `transfer.connector.SchedulerConnector`: the same calls, but the test decides what
becomes of every lease and pull. It asserts that its caller keeps to the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.transfer.events import (
    LeaseEndCause,
    LeaseEnded,
    LoanRequested,
    PlaneEvent,
    PullDone,
    PullFailed,
    PullQuiescent,
)
from kvferry.transfer.ids import DuplicateTransfer
from kvferry.transfer.plane import BlockRun, RemotePrompt
from kvferry.transfer.sampled_tokens import SampledTokens


@dataclass(slots=True)
class StandInPull:
    block_ids: tuple[int, ...]
    """By position; -1 for those before `first_block`."""
    first_block: int
    timeout_s: float
    fill_s: float = 0.0
    cancelled: bool = False


@dataclass(slots=True)
class StandInPrefixPull:
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    timeout_s: float
    cancelled: bool = False


@dataclass(slots=True)
class StandInConnector:
    """Books of what the scheduler asked for; `events` is what it will be told next."""

    leases: dict[str, int] = field(default_factory=dict)
    """Live leases: how many blocks are readable."""
    lease_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ready_leases: set[str] = field(default_factory=set)
    first_tokens: dict[str, SampledTokens | None] = field(default_factory=dict)
    """What was told with each lease that became ready."""
    holds: set[str] = field(default_factory=set)
    hold_timeouts: dict[str, float] = field(default_factory=dict)
    """For how many seconds each hold was asked for."""
    pulls: dict[str, StandInPull] = field(default_factory=dict)
    loans: dict[str, tuple[int, tuple[int, ...], str]] = field(default_factory=dict)
    """What each request for a loan got: tokens, blocks and the hash of the last."""
    prefix_pulls: dict[str, StandInPrefixPull] = field(default_factory=dict)
    unquiet: set[str] = field(default_factory=set)
    withdrawn: list[str] = field(default_factory=list)
    released_early: list[str] = field(default_factory=list)
    """Holds that were given up, so that the producer frees its blocks at once."""
    events: list[PlaneEvent] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    # Calls of the scheduler.

    def register(
        self, transfer_id: str, runs: Sequence[BlockRun], num_tokens: int, ids_hash: str, timeout_s: float
    ) -> None:
        (run,) = runs
        block_ids = run.ids
        assert run.first == 0
        if transfer_id in self._used:
            raise DuplicateTransfer(transfer_id)
        assert block_ids and num_tokens > 0 and timeout_s > 0
        self._used.add(transfer_id)
        self.leases[transfer_id] = 0
        self.lease_blocks[transfer_id] = tuple(block_ids)

    def grant_prefix(
        self, transfer_id: str, block_ids: Sequence[int], num_tokens: int, ids_hash: str
    ) -> bool:
        assert bool(block_ids) == bool(num_tokens) == bool(ids_hash)
        self.loans[transfer_id] = (num_tokens, tuple(block_ids), ids_hash)
        if not block_ids or transfer_id in self._used:
            return False
        self._used.add(transfer_id)
        self.leases[transfer_id] = len(block_ids)
        self.lease_blocks[transfer_id] = tuple(block_ids)
        self.ready_leases.add(transfer_id)
        return True

    def advance(self, transfer_id: str, readable_blocks: int) -> None:
        if transfer_id in self.leases:
            assert self.leases[transfer_id] <= readable_blocks <= len(self.lease_blocks[transfer_id])
            self.leases[transfer_id] = readable_blocks

    def ready(self, transfer_id: str, first_tokens: SampledTokens | None = None) -> None:
        if transfer_id in self.leases:
            self.first_tokens[transfer_id] = first_tokens
            self.ready_leases.add(transfer_id)

    def withdraw(self, transfer_id: str) -> None:
        assert transfer_id not in self.ready_leases
        self.leases.pop(transfer_id, None)
        self.lease_blocks.pop(transfer_id, None)
        self.withdrawn.append(transfer_id)
        self.events = [
            event
            for event in self.events
            if not (isinstance(event, LeaseEnded) and event.transfer_id == transfer_id)
        ]

    def drop(self, transfer_id: str) -> bool:
        if transfer_id not in self.leases:
            return False
        self.end_lease(transfer_id, "dropped")
        return True

    def hold(self, transfer_id: str, remote: RemotePrompt, timeout_s: float) -> None:
        if transfer_id in self.holds or transfer_id in self.pulls:
            raise DuplicateTransfer(transfer_id)
        assert timeout_s > 0
        self.holds.add(transfer_id)
        self.hold_timeouts[transfer_id] = timeout_s

    def pull(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        runs: Sequence[BlockRun],
        timeout_s: float,
        ids_hash: str | None = None,
        fill_s: float = 0.0,
    ) -> None:
        self.holds.remove(transfer_id)
        (run,) = runs
        assert run.ids and ids_hash
        assert timeout_s > 0 and fill_s >= 0
        self.pulls[transfer_id] = StandInPull((-1,) * run.first + run.ids, run.first, timeout_s, fill_s)

    def pull_prefix(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        timeout_s: float,
    ) -> None:
        assert block_ids and len(block_ids) == len(hashes) and timeout_s > 0
        self.prefix_pulls[transfer_id] = StandInPrefixPull(tuple(block_ids), tuple(hashes), timeout_s)

    def cancel(self, transfer_id: str) -> None:
        if transfer_id in self.prefix_pulls:
            self.prefix_pulls[transfer_id].cancelled = True
        elif transfer_id in self.pulls:
            self.pulls[transfer_id].cancelled = True
        elif transfer_id in self.holds:
            self.holds.remove(transfer_id)
            self.released_early.append(transfer_id)

    # What the test lets happen.

    def end_lease(self, transfer_id: str, cause: LeaseEndCause) -> None:
        del self.leases[transfer_id], self.lease_blocks[transfer_id]
        self.ready_leases.discard(transfer_id)
        self.events.append(LeaseEnded(transfer_id=transfer_id, cause=cause))

    def finish_pull(self, transfer_id: str, first_tokens: SampledTokens | None = None) -> None:
        """The pull ends well; a cancelled one ends in failure all the same."""
        pull = self.pulls.pop(transfer_id)
        if pull.cancelled:
            self.events.append(PullFailed(transfer_id=transfer_id, reason="cancelled", quiescent=True))
            return
        self.events.append(
            PullDone(
                transfer_id=transfer_id,
                backend="stand-in",
                nbytes=64,
                descriptors=1,
                wait_s=0.25,
                pull_s=0.5,
                first_tokens=first_tokens,
            )
        )

    def ask_for_loan(self, transfer_id: str, hashes: Sequence[bytes]) -> None:
        self.events.append(LoanRequested(transfer_id=transfer_id, hashes=tuple(hashes)))

    def finish_prefix_pull(self, transfer_id: str, num_blocks: int) -> None:
        """So many of the first blocks came; a cancelled one ends in failure all the same."""
        pull = self.prefix_pulls.pop(transfer_id)
        if pull.cancelled:
            self.events.append(PullFailed(transfer_id=transfer_id, reason="cancelled", quiescent=True))
            return
        done = PullDone(
            transfer_id=transfer_id,
            backend="stand-in",
            nbytes=64 * num_blocks,
            descriptors=1,
            wait_s=0.25,
            pull_s=0.5,
            num_blocks=num_blocks,
        )
        self.events.append(done)

    def fail_prefix_pull(self, transfer_id: str, *, quiescent: bool) -> None:
        del self.prefix_pulls[transfer_id]
        self.events.append(PullFailed(transfer_id=transfer_id, reason="read_failed", quiescent=quiescent))
        if not quiescent:
            self.unquiet.add(transfer_id)

    def fail_pull(
        self,
        transfer_id: str,
        *,
        quiescent: bool,
        first_tokens: SampledTokens | None = None,
        reason: str = "read_failed",
    ) -> None:
        del self.pulls[transfer_id]
        failed = PullFailed(
            transfer_id=transfer_id,
            reason=reason,
            quiescent=quiescent,
            first_tokens=first_tokens,
            backend="tcp",
        )
        self.events.append(failed)
        if not quiescent:
            self.unquiet.add(transfer_id)

    def quieten(self, transfer_id: str) -> None:
        self.unquiet.remove(transfer_id)
        self.events.append(PullQuiescent(transfer_id=transfer_id))

    def take_events(self) -> list[PlaneEvent]:
        events, self.events = self.events, []
        return events
