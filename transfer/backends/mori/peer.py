# SPDX-License-Identifier: Apache-2.0
"""The reading side of the mori backend: one producer rank, read from batch by batch."""

from __future__ import annotations

import selectors
from collections import deque
from concurrent.futures import Future
from typing import Any

from kvferry.transfer.backends.common.handshake import HandshakeAddress, HandshakePeer, PeerState
from kvferry.transfer.backends.mori.library import MoriLibrary
from kvferry.transfer.backends.mori.queue_pairs import QueuePairMaker
from kvferry.transfer.backends.mori.regions import MoriPool, RemotePool, by_pieces
from kvferry.transfer.backends.mori.transfer import BatchState, MoriBatch, MoriTransfer
from kvferry.transfer.engine import PeerBroken, PeerUnreachable
from kvferry.transfer.layout import SpanTable, check_bounds


class MoriPeer(HandshakePeer[MoriTransfer]):
    """One producer rank; see `transfer.engine.Peer`. It is ready once queue pairs to it are made.

    A session is created when its regions are first used, and does not wait for the peer then.
    """

    def __init__(
        self,
        library: MoriLibrary,
        maker: QueuePairMaker,
        local: MoriPool,
        remote: RemotePool,
        address: HandshakeAddress,
        token: bytes,
        selector: selectors.BaseSelector,
        deadline: float,
    ) -> None:
        super().__init__("mori", address, token, selector, deadline)
        self.remote = remote
        self._library = library
        self._maker = maker
        self._local = local
        self._making: Future[None] | None = None
        """Queue pairs that are being made; None before and after."""
        self._sessions: dict[tuple[int, int], Any] = {}
        self._waiting: deque[MoriBatch] = deque()
        self._posted: list[MoriBatch] = []

    @property
    def underway(self) -> bool:
        """Something is in flight and has to be polled."""
        return any(transfer.underway for transfer in self.transfers)

    @property
    def finished(self) -> bool:
        """Lost, and nothing of its transfers is in flight."""
        return self.state is PeerState.LOST and not self.transfers

    def poll(self) -> bool:
        return super().poll() and self._making is None

    def read(self, spans: SpanTable, deadline: float) -> MoriTransfer:
        """Queue a read. Raises ValueError for a span outside the peer's pool or ours."""
        check_bounds(spans, self._local.map.sizes, self.remote.map.sizes)
        transfer = MoriTransfer(self._batches(spans), int(spans[:, 2].sum()), deadline)
        if self.state is not PeerState.READY:
            transfer.fail("peer_lost")
        if not transfer.quiescent:
            self.transfers.append(transfer)
            self._waiting.extend(transfer.batches)
            self._post()
        return transfer

    def progress(self, now: float) -> None:
        """Complete batches that have ended, and post waiting ones."""
        super().progress(now)
        self._progress_making(now)
        for transfer in self.transfers:
            transfer.progress(now)
        if any(transfer.broken for transfer in self.transfers):
            self._library.broken.add(self.remote.key)
            self._end("its queue pairs are in error")
        self.transfers = [transfer for transfer in self.transfers if not transfer.quiescent]
        self._post()

    def next_deadline(self) -> float | None:
        return self._deadline if self._making is not None else super().next_deadline()

    def lose(self, reason: str) -> None:
        """End: it is known to be dead."""
        self._end(reason)

    def abandon(self) -> None:
        """End: the engine has been destroyed."""
        self._end("closed")
        for transfer in self.transfers:
            transfer.abandon()

    def forget_sessions(self) -> None:
        """Drop every session: they must be destroyed before their engine."""
        self._sessions.clear()
        for transfer in self.transfers:
            for batch in transfer.batches:
                batch.forget_session()

    def _accepted(self, welcome: bytes) -> None:
        """Have the queue pairs made."""
        self._making = self._maker.make(self._local, self.remote, self._deadline)

    def _progress_making(self, now: float) -> None:
        """Take what became of the queue pairs."""
        if self._making is None:
            return
        if not self._making.done():
            if self._deadline <= now:
                self._making = None
                self._end("no queue pairs within the deadline")
            return
        made, self._making = self._making, None
        try:
            made.result()
        except PeerUnreachable as error:
            if isinstance(error, PeerBroken):
                self._library.broken.add(self.remote.key)
            self._end(str(error))

    def _batches(self, spans: SpanTable) -> list[MoriBatch]:
        depth = self._library.settings.max_send_wr
        return [
            self._batch(local, remote, rows[first : first + depth])
            for local, remote, rows in by_pieces(spans, self._local.map, self.remote.map)
            for first in range(0, len(rows), depth)
        ]

    def _batch(self, local: int, remote: int, rows: SpanTable) -> MoriBatch:
        return MoriBatch(lambda: self._session(local, remote), rows, self._library.lanes)

    def _post(self) -> None:
        """Post in order, in total never more than one send queue holds, however they spread."""
        self._posted = [batch for batch in self._posted if batch.underway]
        room = self._library.settings.max_send_wr - sum(len(batch) for batch in self._posted)
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
