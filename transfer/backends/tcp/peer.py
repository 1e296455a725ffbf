# SPDX-License-Identifier: Apache-2.0
"""The reading side of the tcp backend: one connection to one producer rank, kept open.

Only `progress` on the transfer thread ever writes into the pool, so a transfer that has failed is
quiescent at once: what is still in flight for it is read into a scratch buffer, or lost with the socket.
"""

from __future__ import annotations

import itertools
import selectors
import time
from collections import deque
from collections.abc import Sequence

from kvferry.transfer.backends.common.connection import TURN_BYTES, ProtocolError
from kvferry.transfer.backends.common.handshake import HandshakeAddress, HandshakePeer, PeerState
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.backends.tcp.wire import PIECE_COLUMNS, PROTOCOL, REQUEST, RESPONSE
from kvferry.transfer.engine import Status
from kvferry.transfer.layout import SpanTable, check_bounds
from kvferry.transfer.memory import PoolMemory

_VIEWS_PER_CALL = 64
_SCRATCH_BYTES = 1 << 18


class TcpTransfer(BaseTransfer):
    """One read over one connection; see `transfer.engine.Transfer`."""

    def __init__(self, number: int, spans: SpanTable, memory: PoolMemory, deadline: float) -> None:
        super().__init__(int(spans[:, 2].sum()), len(spans), deadline)
        self.number = number
        self._spans = spans
        self._memory = memory
        self._buffers: list[memoryview] = []
        self.unfilled = deque[memoryview]()

    @property
    def quiescent(self) -> bool:
        return self._status is not Status.PENDING

    def fail(self, reason: str) -> None:
        super().fail(reason)
        self.unfilled.clear()

    def begin(self) -> None:
        """Have buffers for the bytes that come now, unless it has ended."""
        if self._status is Status.PENDING:
            self._buffers = self._memory.writable(self._spans)
            self.unfilled.extend(self._buffers)

    def finish(self) -> None:
        """Succeed, unless it has ended: every byte is in the buffers."""
        if self._status is Status.PENDING:
            self._memory.commit(self._spans, self._buffers)
            self._buffers = []
            self.succeed()

    def advance(self, nbytes: int) -> None:
        """Mark the next `nbytes` bytes as filled."""
        while nbytes:
            view = self.unfilled.popleft()
            if nbytes < len(view):
                self.unfilled.appendleft(view[nbytes:])
                return
            nbytes -= len(view)


class TcpPeer(HandshakePeer[TcpTransfer]):
    """One producer rank; see `transfer.engine.Peer`. `transfers` is a queue: reads are answered in order.

    `sizes` are those of its pool's regions, in bytes.
    """

    def __init__(
        self,
        address: HandshakeAddress,
        sizes: Sequence[int],
        token: bytes,
        memory: PoolMemory,
        selector: selectors.BaseSelector,
        deadline: float,
    ) -> None:
        super().__init__("tcp", address, token, selector, deadline, PROTOCOL)
        self._sizes = sizes
        self._memory = memory
        self._numbers = itertools.count()
        self._body_left = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def read(self, spans: SpanTable, timeout_s: float) -> TcpTransfer:
        """Queue a read. Raises ValueError for a span outside the peer's pool or ours."""
        check_bounds(spans, self._memory.sizes, self._sizes)
        transfer = TcpTransfer(next(self._numbers), spans, self._memory, time.monotonic() + timeout_s)
        if self.closed:
            transfer.fail("peer_lost")
            return transfer
        self.transfers.append(transfer)
        pieces = spans[:, 1:].astype(PIECE_COLUMNS).tobytes()
        self.send(REQUEST.pack(transfer.number, len(spans)) + pieces)
        return transfer

    def progress(self, now: float) -> None:
        """Fail what has passed its deadline. A transfer that has ends the connection."""
        super().progress(now)
        for transfer in list(self.transfers):
            if transfer.deadline <= now:
                transfer.fail("deadline")
                self._end("a transfer passed its deadline")

    def next_deadline(self) -> float | None:
        times = [super().next_deadline(), *(transfer.deadline for transfer in self.transfers)]
        return min((each for each in times if each is not None), default=None)

    def _accepted(self, welcome: bytes) -> None:
        """Do nothing: reads need only the connection."""

    def _receive(self) -> None:
        budget = TURN_BYTES
        while budget > 0 and not self.closed:
            nbytes = self._receive_body() if self._body_left else self._receive_head()
            if nbytes == 0:
                raise ProtocolError("connection closed by the peer")
            budget -= nbytes

    def _receive_head(self) -> int:
        """Receive no more than the next head: the bytes behind it go into the pool."""
        head = RESPONSE if self.state is PeerState.READY else PROTOCOL.welcome
        chunk = self._socket.recv(head.size - len(self._inbox))
        self._inbox += chunk
        if len(self._inbox) == head.size:
            if head is RESPONSE:
                self._begin_body(*RESPONSE.unpack(self._inbox))
                self._inbox.clear()
            else:
                self._received(self._inbox)
        return len(chunk)

    def _begin_body(self, number: int, granted: int, nbytes: int) -> None:
        if not self.transfers or self.transfers[0].number != number:
            raise ProtocolError(f"response to transfer {number}, which is not the next")
        transfer = self.transfers[0]
        if not granted:
            transfer.fail("refused")
        elif nbytes != transfer.nbytes:
            transfer.fail("truncated")
        else:
            transfer.begin()
        self._body_left = nbytes
        if nbytes == 0:
            self._end_body()

    def _receive_body(self) -> int:
        transfer = self.transfers[0]
        if transfer.unfilled:
            views = list(itertools.islice(transfer.unfilled, _VIEWS_PER_CALL))
            nbytes = self._socket.recvmsg_into(views)[0]
            transfer.advance(nbytes)
        else:
            nbytes = self._socket.recv_into(self._scratch[: self._body_left])
        self._body_left -= nbytes
        if self._body_left == 0:
            self._end_body()
        return nbytes

    def _end_body(self) -> None:
        self.transfers.pop(0).finish()

    def _ended(self, reason: str) -> None:
        super()._ended(reason)
        self.transfers.clear()
