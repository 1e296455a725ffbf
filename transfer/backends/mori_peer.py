# SPDX-License-Identifier: Apache-2.0
"""One producer rank as its reader sees it: greeted, connected, and read from batch by batch."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transfer.backends.greeting import Visit, VisitState
from transfer.backends.mori_library import Library
from transfer.backends.mori_regions import MoriRegion, RemotePool, by_regions
from transfer.backends.mori_transfer import BatchState, MoriBatch, MoriTransfer
from transfer.engine import PeerUnreachable
from transfer.layout import SpanTable


class PeerState(enum.Enum):
    GREETING = "greeting"
    READY = "ready"
    LOST = "lost"


_TABLE: Mapping[PeerState, frozenset[PeerState]] = MappingProxyType(
    {
        PeerState.GREETING: frozenset({PeerState.READY, PeerState.LOST}),
        PeerState.READY: frozenset({PeerState.LOST}),
        PeerState.LOST: frozenset(),
    }
)


class MoriPeer:
    """One producer rank; see `transfer.engine.Peer`. A session is made when its regions are first used."""

    def __init__(self, library: Library, local: MoriRegion, remote: RemotePool, visit: Visit) -> None:
        self.state = PeerState.GREETING
        self.remote = remote
        self.transfers: list[MoriTransfer] = []
        self._library = library
        self._local = local
        self._visit = visit
        self._error = ""
        self._sessions: dict[tuple[int, int], Any] = {}
        self._waiting: deque[MoriBatch] = deque()
        self._posted: list[MoriBatch] = []

    @property
    def underway(self) -> bool:
        """There is something to be polled for."""
        return any(transfer.underway for transfer in self.transfers)

    @property
    def over(self) -> bool:
        """Lost, and no byte of its transfers can come any more."""
        return self.state is PeerState.LOST and not self.transfers

    def poll(self) -> bool:
        if self.state is PeerState.LOST:
            raise PeerUnreachable(f"mori: {self._error}")
        return self.state is PeerState.READY

    def close(self) -> None:
        self._lose("closed")

    def read(self, spans: SpanTable, deadline: float) -> MoriTransfer:
        """Begin. Raises ValueError for a span outside the peer's pool or ours."""
        if len(spans) and int((spans[:, 1] + spans[:, 2]).max()) > self.remote.pool.nbytes:
            raise ValueError("a span lies outside the peer's pool")
        if len(spans) and int((spans[:, 0] + spans[:, 2]).max()) > self._local.nbytes:
            raise ValueError("a span lies outside the pool")
        transfer = MoriTransfer(self._batches(spans), int(spans[:, 2].sum()), deadline)
        if self.state is not PeerState.READY:
            transfer.fail("peer_lost")
        if not transfer.quiescent:
            self.transfers.append(transfer)
            self._waiting.extend(transfer.batches)
            self._post()
        return transfer

    def progress(self, now: float) -> None:
        """Take what has been greeted, posted, and ended a step further."""
        self._follow_visit(now)
        for transfer in self.transfers:
            transfer.progress(now)
        if any(transfer.broken for transfer in self.transfers):
            self._library.broken.add(self.remote.key)
            self._lose("its queue pairs are in error")
        self.transfers = [transfer for transfer in self.transfers if not transfer.quiescent]
        self._post()

    def next_deadline(self) -> float | None:
        return self._visit.next_deadline()

    def abandon(self) -> None:
        """The engine has been destroyed."""
        self._lose("closed")
        for transfer in self.transfers:
            transfer.abandon()

    def forget_sessions(self) -> None:
        """Sessions must be gone before their engine is."""
        self._sessions.clear()
        for transfer in self.transfers:
            for batch in transfer.batches:
                batch.forget_session()

    def _follow_visit(self, now: float) -> None:
        self._visit.expire(now)
        if self._visit.state is VisitState.LOST and self.state is not PeerState.LOST:
            self._lose(self._visit.error)
        elif self._visit.state is VisitState.WELCOME and self.state is PeerState.GREETING:
            self._connect()

    def _connect(self) -> None:
        """Make the queue pairs, with the first session."""
        try:
            session = self._session(0, 0)
        except (RuntimeError, OSError) as error:
            self._lose(str(error))
            return
        if session is None:
            self._lose("no way between their memory and ours")
            return
        self._transition(PeerState.READY)

    def _lose(self, why: str) -> None:
        if self.state is PeerState.LOST:
            return
        self._transition(PeerState.LOST)
        self._error = why
        self._visit.close()
        for transfer in self.transfers:
            transfer.fail("peer_lost")

    def _batches(self, spans: SpanTable) -> list[MoriBatch]:
        depth = self._library.settings.send_depth
        theirs = self.remote.pool.region_bytes
        return [
            self._batch(local, remote, rows[first : first + depth])
            for local, remote, rows in by_regions(spans, self._local.region_bytes, theirs)
            for first in range(0, len(rows), depth)
        ]

    def _batch(self, local: int, remote: int, rows: SpanTable) -> MoriBatch:
        return MoriBatch(lambda: self._session(local, remote), rows, self._library.lanes)

    def _post(self) -> None:
        """Post in order, but together never more than a single send queue holds, however they spread."""
        self._posted = [batch for batch in self._posted if batch.underway]
        room = self._library.settings.send_depth - sum(len(batch) for batch in self._posted)
        while self._waiting and len(self._waiting[0]) <= room:
            batch = self._waiting.popleft()
            if batch.state is BatchState.WAITING:
                room -= len(batch)
                batch.post()
                self._posted.append(batch)

    def _session(self, local: int, remote: int) -> Any:
        key = (local, remote)
        if key not in self._sessions:
            self._sessions[key] = self._library.engine.create_session(
                self._local.memory[local], self.remote.memory[remote]
            )
        return self._sessions[key]

    def _transition(self, to: PeerState) -> None:
        if to not in _TABLE[self.state]:
            raise AssertionError(f"peer {self.state.value} → {to.value}")
        self.state = to
