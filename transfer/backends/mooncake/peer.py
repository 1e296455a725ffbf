# SPDX-License-Identifier: Apache-2.0
"""One producer rank as a reader sees it through Mooncake, and the reads from it."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque

from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.mooncake.library import (
    CANARY_BYTES,
    MooncakeAddress,
    MooncakeLibrary,
    MooncakePoolAddress,
    Piece,
)
from kvferry.transfer.engine import PeerUnreachable, Status
from kvferry.transfer.layout import SpanTable
from kvferry.transfer.state_machine import Transitions, transition, transitions

PIECE_BYTES = 64 << 20
"""Longest single read. Mooncake takes none back, so this is the most that a cancelled one still brings."""
WINDOW = 256
"""Reads in flight per producer. Mooncake's own queue takes 1024 and fails what waits for it over a second."""
_WINDOW_BYTES = 256 << 20


class MooncakeTransfer:
    """One read in pieces; see `transfer.engine.Transfer`. Pieces are `waiting`, then `flying` by batch."""

    def __init__(self, pieces: list[Piece], descriptors: int, deadline: float) -> None:
        self.reason: str | None = None
        self.nbytes = sum(piece.length for piece in pieces)
        self.descriptors = descriptors
        self.deadline = deadline
        self.waiting = deque(pieces)
        self.flying: dict[int, Piece] = {}
        self._failed = False

    @property
    def quiescent(self) -> bool:
        return not self.flying and self.poll() is not Status.PENDING

    def poll(self) -> Status:
        if self._failed:
            return Status.FAILED
        return Status.PENDING if self.waiting or self.flying else Status.DONE

    def cancel(self) -> None:
        self.fail("cancelled")

    def fail(self, reason: str) -> None:
        """End without the bytes, unless it has ended. What flies goes on until Mooncake says it is over."""
        if self.poll() is Status.PENDING:
            self.reason = reason
            self._failed = True
            self.waiting.clear()

    def post(self, library: MooncakeLibrary, segment: str) -> int:
        """Hand the next piece to Mooncake; returns its bytes. Waits for the peer if the segment is new."""
        piece = self.waiting[0]
        batch = library.start_read(segment, piece)
        if batch == 0:
            self.fail("refused")
            return 0
        self.flying[batch] = piece
        self.waiting.popleft()
        return piece.length

    def collect(self, library: MooncakeLibrary) -> int:
        """Take note of the pieces that are over; returns their bytes."""
        over = 0
        for batch in list(self.flying):
            state = library.check(batch)
            if state is Status.FAILED:
                self.fail("peer_lost")
            if state is not Status.PENDING:
                over += self.flying.pop(batch).length
        return over

    def abandon(self) -> None:
        """The engine that carried it is destroyed; nothing is written after that."""
        self.fail("peer_lost")
        self.flying.clear()


class MooncakeState(enum.Enum):
    OPENING = "opening"
    """A thread opens the segment and posts the first read."""
    CHECKING = "checking"
    """The first read, of the peer's proof, is under way."""
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
    """See `transfer.engine.Peer`. The peer's proof is read first, so it is known to answer, and to be itself.

    While the thread of OPENING runs, `library` and the first read are its own, whatever the state is.
    """

    def __init__(
        self,
        library: MooncakeLibrary,
        address: MooncakeAddress,
        pool: MooncakePoolAddress,
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
        self._bytes_flying = 0
        bounce_buffer = Piece(library.bounce_buffer.ctypes.data, address.canary_address, CANARY_BYTES)
        self._first = MooncakeTransfer([bounce_buffer], 1, self._deadline)
        self._waker = waker
        self._opened = threading.Event()
        threading.Thread(target=self._open, name=f"mooncake-{self.segment}", daemon=True).start()

    def __repr__(self) -> str:
        return f"<MooncakePeer {self.segment} {self.state.value}>"

    @property
    def opening(self) -> bool:
        """The thread is still at it, maybe for longer than anybody cares."""
        return not self._opened.is_set()

    @property
    def idle(self) -> bool:
        """It has ended, and nothing runs in its engine any more."""
        return self.state is MooncakeState.ENDED and not self.opening and not self._under_way()

    def poll(self) -> bool:
        if self.state is MooncakeState.ENDED:
            raise PeerUnreachable(f"mooncake: {self._error}")
        return self.state is MooncakeState.READY

    def close(self) -> None:
        self._end("closed")

    def read(self, transfer: MooncakeTransfer) -> None:
        """Queue a transfer; it fails at once if the peer has gone."""
        if self.state is not MooncakeState.READY:
            transfer.fail("peer_lost")
            return
        self._transfers.append(transfer)
        self._post()

    def progress(self, now: float) -> None:
        """Everything that can be done without waiting."""
        if not self.opening:
            for transfer in self._under_way():
                self._bytes_flying -= transfer.collect(self.library)
            self._meet()
            self._post()
        self._expire(now)
        self._transfers = [each for each in self._transfers if not each.quiescent]

    def next_deadline(self, now: float) -> float | None:
        """Now, while a read is in flight: Mooncake has nothing that could wake us."""
        if self.opening:
            return self._deadline if self.state is MooncakeState.OPENING else None
        return now if self._under_way() else None

    def abandon(self) -> None:
        """Destroy the engine and with it whatever it still does. Not while the thread has it."""
        self._end("closed")
        transfers = self._under_way()
        self.library.close()
        for transfer in transfers:
            transfer.abandon()
        self._transfers.clear()

    def _open(self) -> None:
        """On the thread."""
        self._bytes_flying += self._first.post(self.library, self.segment)
        self._opened.set()
        self._waker.wake()

    def _under_way(self) -> list[MooncakeTransfer]:
        first = [] if self.opening or self._first.quiescent else [self._first]
        return first + self._transfers

    def _meet(self) -> None:
        """Move on from OPENING to READY, or find that this is not the peer that was described."""
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
                self._bytes_flying += transfer.post(self.library, self.segment)

    def _has_room(self) -> bool:
        flying = sum(len(transfer.flying) for transfer in self._transfers)
        return flying < WINDOW and self._bytes_flying < _WINDOW_BYTES

    def _end(self, error: str) -> None:
        if self.state is MooncakeState.ENDED:
            return
        self._transition(MooncakeState.ENDED)
        self._error = error
        for transfer in self._under_way():
            transfer.fail("peer_lost")

    def _transition(self, to: MooncakeState) -> None:
        self.state = transition(self, MOONCAKE_TRANSITIONS, self.state, to)


def cut(spans: SpanTable, local_base: int, remote_base: int) -> list[Piece]:
    """The spans as reads of at most `PIECE_BYTES`, by address."""
    return [
        Piece(local_base + local + done, remote_base + remote + done, min(PIECE_BYTES, length - done))
        for local, remote, length in spans.tolist()
        for done in range(0, length, PIECE_BYTES)
    ]
