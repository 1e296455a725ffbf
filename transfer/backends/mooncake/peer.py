# SPDX-License-Identifier: Apache-2.0
"""The reading side of the mooncake backend: one producer rank."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvferry.common.state_machine import Transitions, transition, transitions
from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.mooncake.library import (
    CANARY_BYTES,
    MooncakeAddress,
    MooncakeLibrary,
    MooncakeRegionAddress,
    Piece,
)
from kvferry.transfer.engine import PeerUnreachable, Status
from kvferry.transfer.layout import SpanTable, addresses

PIECE_BYTES = 64 << 20
"""Longest single read. Mooncake cancels none, so this is the most that a cancelled one still writes."""
WINDOW = 256
"""Reads in flight per producer. Mooncake's own queue holds 1024 and fails what waits over a second."""
_WINDOW_BYTES = 256 << 20


class MooncakeTransfer:
    """One read in pieces; see `transfer.engine.Transfer`. Pieces are `waiting`, then `in_flight` by batch."""

    def __init__(self, pieces: list[Piece], descriptors: int, deadline: float) -> None:
        self.reason: str | None = None
        self.nbytes = sum(piece.length for piece in pieces)
        self.descriptors = descriptors
        self.deadline = deadline
        self.waiting = deque(pieces)
        self.in_flight: dict[int, Piece] = {}
        self._failed = False

    @property
    def quiescent(self) -> bool:
        return not self.in_flight and self.poll() is not Status.PENDING

    def poll(self) -> Status:
        if self._failed:
            return Status.FAILED
        return Status.PENDING if self.waiting or self.in_flight else Status.DONE

    def cancel(self) -> None:
        self.fail("cancelled")

    def fail(self, reason: str) -> None:
        """Fail, unless it has ended. Pieces in flight go on until Mooncake reports their end."""
        if self.poll() is Status.PENDING:
            self.reason = reason
            self._failed = True
            self.waiting.clear()

    def post(self, library: MooncakeLibrary, segment: str) -> int:
        """Post the next piece; returns its bytes. Blocks on the peer if the segment is new."""
        piece = self.waiting[0]
        batch = library.start_read(segment, piece)
        if batch == 0:
            self.fail("refused")
            return 0
        self.in_flight[batch] = piece
        self.waiting.popleft()
        return piece.length

    def collect(self, library: MooncakeLibrary) -> int:
        """Remove the pieces that have ended; returns their bytes."""
        over = 0
        for batch in list(self.in_flight):
            state = library.check(batch)
            if state is Status.FAILED:
                self.fail("peer_lost")
            if state is not Status.PENDING:
                over += self.in_flight.pop(batch).length
        return over

    def abandon(self) -> None:
        """End: its engine is destroyed, and nothing is written after that."""
        self.fail("peer_lost")
        self.in_flight.clear()


class MooncakeState(enum.Enum):
    OPENING = "opening"
    """A thread opens the segment and posts the first read."""
    CHECKING = "checking"
    """The first read, of the peer's canary, is in flight."""
    READY = "ready"
    ENDED = "ended"


MOONCAKE_TRANSITIONS: Transitions[MooncakeState] = transitions(
    {
        MooncakeState.OPENING: {MooncakeState.CHECKING, MooncakeState.ENDED},
        MooncakeState.CHECKING: {MooncakeState.READY, MooncakeState.ENDED},
        MooncakeState.READY: {MooncakeState.ENDED},
    }
)


class MooncakePeer:
    """See `transfer.engine.Peer`. Its canary is read first: the peer answers and is the one described.

    While the thread of OPENING runs, `library` and the first read are its own, whatever the state is.
    """

    def __init__(
        self,
        library: MooncakeLibrary,
        address: MooncakeAddress,
        pool: Sequence[MooncakeRegionAddress],
        waker: Waker,
        timeout_s: float,
    ) -> None:
        self.library = library
        self.segment = address.segment
        self.pool = pool
        self.state = MooncakeState.OPENING
        self._canary = address.canary
        self._deadline = time.monotonic() + timeout_s
        self._error = ""
        self._transfers: list[MooncakeTransfer] = []
        self._bytes_in_flight = 0
        bounce_buffer = Piece(library.bounce_buffer.ctypes.data, address.canary_address, CANARY_BYTES)
        self._first = MooncakeTransfer([bounce_buffer], 1, self._deadline)
        self._waker = waker
        self._opened = threading.Event()
        threading.Thread(target=self._open, name=f"mooncake-{self.segment}", daemon=True).start()

    def __repr__(self) -> str:
        return f"<MooncakePeer {self.segment} {self.state.value}>"

    @property
    def opening(self) -> bool:
        """The thread is running, maybe beyond the deadline."""
        return not self._opened.is_set()

    @property
    def finished(self) -> bool:
        """It has ended, and nothing runs in its engine any more."""
        return self.state is MooncakeState.ENDED and not self.opening and not self._unfinished()

    def poll(self) -> bool:
        if self.state is MooncakeState.ENDED:
            raise PeerUnreachable(f"mooncake: {self._error}")
        return self.state is MooncakeState.READY

    def close(self) -> None:
        self._end("closed")

    def read(self, transfer: MooncakeTransfer) -> None:
        """Queue a transfer; it fails at once if the peer is not ready."""
        if self.state is not MooncakeState.READY:
            transfer.fail("peer_lost")
            return
        self._transfers.append(transfer)
        self._post()

    def progress(self, now: float) -> None:
        """Collect what has ended, and post what waits. Never blocks."""
        if not self.opening:
            for transfer in self._unfinished():
                self._bytes_in_flight -= transfer.collect(self.library)
            self._check()
            self._post()
        self._expire(now)
        self._transfers = [each for each in self._transfers if not each.quiescent]

    def next_deadline(self, now: float) -> float | None:
        """Now, while a read is in flight: Mooncake has no descriptor."""
        if self.opening:
            return self._deadline if self.state is MooncakeState.OPENING else None
        return now if self._unfinished() else None

    def abandon(self) -> None:
        """Destroy the engine, and end what is in flight. Not while the thread runs."""
        self._end("closed")
        transfers = self._unfinished()
        self.library.close()
        for transfer in transfers:
            transfer.abandon()
        self._transfers.clear()

    def _open(self) -> None:
        """On the thread."""
        self._bytes_in_flight += self._first.post(self.library, self.segment)
        self._opened.set()
        self._waker.wake()

    def _unfinished(self) -> list[MooncakeTransfer]:
        first = [] if self.opening or self._first.quiescent else [self._first]
        return first + self._transfers

    def _check(self) -> None:
        """Become READY if the canary is the one described, or end."""
        if self.state is MooncakeState.OPENING:
            self._transition(MooncakeState.CHECKING)
        if self.state is MooncakeState.ENDED:
            self._first.cancel()
        if self.state is not MooncakeState.CHECKING:
            return
        status = self._first.poll()
        if status is Status.FAILED:
            self._end(f"first read failed: {self._first.reason}")
        elif status is Status.DONE and self.library.bounce_buffer.tobytes() != self._canary:
            self._end("the peer is not the one that was described")
        elif status is Status.DONE:
            self._transition(MooncakeState.READY)

    def _expire(self, now: float) -> None:
        for transfer in self._transfers:
            if transfer.deadline <= now:
                transfer.fail("deadline")
        if self.state in (MooncakeState.OPENING, MooncakeState.CHECKING) and self._deadline <= now:
            self._end("no answer within the deadline")

    def _post(self) -> None:
        for transfer in self._transfers:
            while transfer.waiting and self._has_room():
                self._bytes_in_flight += transfer.post(self.library, self.segment)

    def _has_room(self) -> bool:
        in_flight = sum(len(transfer.in_flight) for transfer in self._transfers)
        return in_flight < WINDOW and self._bytes_in_flight < _WINDOW_BYTES

    def _end(self, error: str) -> None:
        if self.state is MooncakeState.ENDED:
            return
        self._transition(MooncakeState.ENDED)
        self._error = error
        for transfer in self._unfinished():
            transfer.fail("peer_lost")

    def _transition(self, to: MooncakeState) -> None:
        self.state = transition(self, MOONCAKE_TRANSITIONS, self.state, to)


def cut(
    spans: SpanTable, ours: Sequence[MooncakeRegionAddress], theirs: Sequence[MooncakeRegionAddress]
) -> list[Piece]:
    """Split spans into reads of at most `PIECE_BYTES`, by address."""
    locals_ = addresses(spans[:, 0], [region.address for region in ours]).tolist()
    remotes = addresses(spans[:, 1], [region.address for region in theirs]).tolist()
    return [
        Piece(local + done, remote + done, min(PIECE_BYTES, length - done))
        for local, remote, length in zip(locals_, remotes, spans[:, 2].tolist(), strict=True)
        for done in range(0, length, PIECE_BYTES)
    ]
