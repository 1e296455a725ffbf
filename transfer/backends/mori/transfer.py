# SPDX-License-Identifier: Apache-2.0
"""Reads over MORI-IO, in batches, and fences that prove when a failed one has stopped writing.

MORI cannot cancel, and goes on writing after an error. A batch is spread over several queue pairs; its status
turns to an error at the first failure on any of them, or when a part of it could not be posted, while others
are still being written, and never changes again. So a fence is posted behind a failed batch: one tiny read on
every queue pair. Work on a queue pair completes in the order of posting; hence a fence read that succeeds
proves that everything before it has ended, and one that fails proves that its queue pair is in the error
state, in which a NIC writes nothing any more. A fence reads the first bytes of the failed batch again, so it
writes only to a destination that is not quiescent yet.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.common.state_machine import Transitions, transition, transitions
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.engine import Status
from kvferry.transfer.layout import SpanTable

_FENCE_BYTES = 8
_NEVER_POSTED = (
    "SQ ",
    "EP is degraded",
    "ibv_post_send",
    "submission ledger",
    "length out of range",
    "no endpoints",
)
"""Prefixes of messages about a request that never reached a queue pair: as a fence it proves nothing."""


class BatchState(enum.Enum):
    WAITING = "waiting"
    POSTED = "posted"
    FENCED = "fenced"
    """It failed; the fence behind it is posted."""
    DONE = "done"
    """Every byte has arrived."""
    SETTLED = "settled"
    """It failed, or was never posted, and nothing of it is in flight."""
    STUCK = "stuck"
    """It failed, and only destroying the engine proves that it has stopped."""


BATCH_TRANSITIONS: Transitions[BatchState] = transitions(
    {
        BatchState.WAITING: {BatchState.POSTED, BatchState.FENCED, BatchState.SETTLED, BatchState.STUCK},
        BatchState.POSTED: {BatchState.DONE, BatchState.FENCED, BatchState.STUCK},
        BatchState.FENCED: {BatchState.SETTLED, BatchState.STUCK},
    }
)


@dataclass(frozen=True, slots=True)
class Lanes:
    """The library as a batch needs it: transfer ids, error codes, and the number of queue pairs.

    A single read with id `u` uses queue pair `u % count`.
    """

    count: int
    next_uid: Callable[[], int]
    peer_error: Any
    gpu_error: Any


class MoriBatch:
    """Spans between one pair of regions: one session, one status. `rows` count from the regions' starts."""

    def __init__(self, open_session: Callable[[], Any], rows: SpanTable, lanes: Lanes) -> None:
        self.state = BatchState.WAITING
        self.reason = ""
        self.broken = False
        """A queue pair is in the error state, and MORI never recreates it."""
        self._open_session = open_session
        self._rows = rows
        self._lanes = lanes
        self._session: Any = None
        # MORI writes into a status through a bare pointer, so both live as long as the batch.
        self._status: Any = None
        self._fence: list[Any] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def underway(self) -> bool:
        """Posted, and not known to have ended."""
        return self.state in (BatchState.POSTED, BatchState.FENCED)

    def post(self) -> None:
        """Post. The columns come from one table: the library ends its process when their lengths differ."""
        try:
            self._session = self._open_session()
        except (RuntimeError, OSError):
            self._session = None
        if self._session is None:
            self.reason = "peer_lost"
            self._transition(BatchState.SETTLED)
            return
        columns: Sequence[list[int]] = self._rows.T.tolist()
        try:
            self._status = self._session.batch_read(*columns, self._lanes.next_uid())
        except RuntimeError:
            self._fail("refused")
            return
        self._transition(BatchState.POSTED)

    def forget_session(self) -> None:
        """Drop the session: the engine is about to be destroyed."""
        self._session = None

    def drop(self) -> None:
        """Settle a batch that will not be posted."""
        if self.state is BatchState.WAITING:
            self._transition(BatchState.SETTLED)

    def progress(self) -> None:
        """Poll the statuses."""
        if self.state is BatchState.POSTED:
            self._progress_read()
        elif self.state is BatchState.FENCED:
            self._progress_fence()

    def _progress_read(self) -> None:
        status = self._status
        if status.Succeeded():  # a status still in INIT has neither succeeded nor failed
            self._transition(BatchState.DONE)
        elif status.Failed() and status.Code() == self._lanes.gpu_error:
            # Copies between GPUs run on streams, which a fence does not order.
            self.reason = "peer_lost"
            self._transition(BatchState.STUCK)
        elif status.Failed():
            self._fail("peer_lost" if status.Code() == self._lanes.peer_error else "refused")

    def _fail(self, reason: str) -> None:
        """Post the fence: a read for each queue pair, even while other threads take ids."""
        self.reason = reason
        self._transition(BatchState.FENCED)
        local, remote, length = self._rows[0].tolist()
        nbytes = min(length, _FENCE_BYTES)
        first_uid = self._lanes.next_uid() * self._lanes.count
        try:
            for lane in range(self._lanes.count):
                self._fence.append(self._session.read(local, remote, nbytes, first_uid + lane))
        except RuntimeError:
            self._transition(BatchState.STUCK)

    def _progress_fence(self) -> None:
        if not all(status.Succeeded() or status.Failed() for status in self._fence):
            return
        messages = [status.Message() for status in self._fence if status.Failed()]
        self.broken = bool(messages)
        proven = not any(message.startswith(_NEVER_POSTED) for message in messages)
        self._transition(BatchState.SETTLED if proven else BatchState.STUCK)

    def _transition(self, to: BatchState) -> None:
        self.state = transition("mori batch", BATCH_TRANSITIONS, self.state, to)
        if not self.underway:
            self._session = None  # sessions must be destroyed before their engine


class MoriTransfer(BaseTransfer):
    """One read; see `transfer.engine.Transfer`. It fails with any of its batches."""

    def __init__(self, batches: Sequence[MoriBatch], nbytes: int, deadline: float) -> None:
        super().__init__(nbytes, sum(len(batch) for batch in batches), deadline)
        self.quiescent = False
        self.batches = batches
        self._settle()

    @property
    def underway(self) -> bool:
        """There is something to be polled for."""
        return self._status is Status.PENDING or any(batch.underway for batch in self.batches)

    @property
    def broken(self) -> bool:
        return any(batch.broken for batch in self.batches)

    def fail(self, reason: str) -> None:
        """Fail, unless it has ended; waiting batches are not posted any more."""
        super().fail(reason)
        for batch in self.batches:
            batch.drop()
        self._settle()

    def progress(self, now: float) -> None:
        """Poll every batch, after a failure until nothing is in flight."""
        for batch in self.batches:
            batch.progress()
            if batch.reason:
                self.fail(batch.reason)
        self._settle()
        if self.deadline <= now:
            self.fail("deadline")

    def abandon(self) -> None:
        """End: the engine has been destroyed, and nothing is written after that."""
        self.fail("peer_lost")
        self.quiescent = True

    def _settle(self) -> None:
        states = {batch.state for batch in self.batches}
        if states <= {BatchState.DONE}:
            self.succeed()
        if self._status is not Status.PENDING and states <= {BatchState.DONE, BatchState.SETTLED}:
            self.quiescent = True
