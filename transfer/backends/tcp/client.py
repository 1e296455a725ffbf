# SPDX-License-Identifier: Apache-2.0
"""The reading side of the tcp backend: one connection to one producer rank, kept open.

Only `progress` on the transfer thread ever writes into the pool, so a transfer that has failed is
quiescent at once: what is still in flight for it is read into a scratch buffer, or dies with the socket.
"""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import time
from collections import deque

from kvferry.transfer.backends.common import sockets
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.backends.tcp.wire import GREETING, MAGIC, PIECE, REQUEST, RESPONSE, WELCOME, TcpAddress
from kvferry.transfer.engine import PeerUnreachable, Status
from kvferry.transfer.layout import SpanTable, check_bounds
from kvferry.transfer.memory import PoolMemory

_VIEWS_PER_CALL = 64
_SLICE_BYTES = 8 << 20
"""Bytes taken from one connection before the others get their turn."""
_SCRATCH_BYTES = 1 << 18


class TcpTransfer(BaseTransfer):
    """One read over one connection; see `transfer.engine.Transfer`."""

    def __init__(self, number: int, spans: SpanTable, memory: PoolMemory, deadline: float) -> None:
        super().__init__(int(spans[:, 2].sum()), len(spans), deadline)
        self.number = number
        self._spans = spans
        self._memory = memory
        self._buffers = memory.writable(spans)
        self.unfilled = deque(self._buffers)

    @property
    def quiescent(self) -> bool:
        return self._status is not Status.PENDING

    def fail(self, reason: str) -> None:
        super().fail(reason)
        self.unfilled.clear()

    def finish(self) -> None:
        """Every byte is in the buffers."""
        if self._status is Status.PENDING:
            self._memory.commit(self._spans, self._buffers)
            self.succeed()

    def advance(self, nbytes: int) -> None:
        """The next `nbytes` bytes are in the buffers."""
        while nbytes:
            view = self.unfilled.popleft()
            if nbytes < len(view):
                self.unfilled.appendleft(view[nbytes:])
                return
            nbytes -= len(view)


class TcpPeer:
    """One producer rank; see `transfer.engine.Peer`."""

    def __init__(
        self,
        address: TcpAddress,
        pool_bytes: int,
        token: bytes,
        memory: PoolMemory,
        selector: selectors.BaseSelector,
        timeout_s: float,
    ) -> None:
        self._pool_bytes = pool_bytes
        self._memory = memory
        self._selector = selector
        self._numbers = itertools.count()
        self._queue: deque[TcpTransfer] = deque()
        self._outbox = bytearray(GREETING.pack(MAGIC, address.nonce, token))
        self._inbox = bytearray()
        self._body_left = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._connect_deadline = time.monotonic() + timeout_s
        self._error: str | None = None
        self._ready = False
        self._socket = sockets.dial(address.host, address.port)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(self._socket, selectors.EVENT_WRITE, self)

    @property
    def broken(self) -> bool:
        """The connection is over; a new one takes a new peer."""
        return self._error is not None

    def poll(self) -> bool:
        if self._error is not None:
            raise PeerUnreachable(self._error)
        return self._ready

    def close(self) -> None:
        self._break("peer_lost", "closed")

    def read(self, spans: SpanTable, timeout_s: float) -> TcpTransfer:
        """Queue a read. Raises ValueError for a span outside the peer's pool or ours."""
        check_bounds(spans, self._memory.nbytes, self._pool_bytes)
        transfer = TcpTransfer(next(self._numbers), spans, self._memory, time.monotonic() + timeout_s)
        if self._error is not None:
            transfer.fail("peer_lost")
            return transfer
        self._queue.append(transfer)
        self._outbox += REQUEST.pack(transfer.number, len(spans))
        self._outbox += b"".join(PIECE.pack(remote, length) for _, remote, length in spans.tolist())
        self._send()
        return transfer

    def on_ready(self, events: int) -> None:
        """The socket can be read or written."""
        if self.broken:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._check_connected()
                self._send()
            if events & selectors.EVENT_READ:
                self._receive()
        except OSError as error:
            self._break("peer_lost", os.strerror(error.errno or 0))

    def expire(self, now: float) -> None:
        """Give up what has passed its deadline. A transfer that did takes the connection with it."""
        if not self._ready and self._error is None and self._connect_deadline <= now:
            self._break("peer_lost", "no connection within the deadline")
        for transfer in list(self._queue):
            if transfer.deadline <= now:
                transfer.fail("deadline")
                self._break("peer_lost", "a transfer passed its deadline")

    def next_deadline(self) -> float | None:
        times = [transfer.deadline for transfer in self._queue]
        if not self._ready and self._error is None:
            times.append(self._connect_deadline)
        return min(times, default=None)

    def _check_connected(self) -> None:
        if not self._ready:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))

    def _send(self) -> None:
        if self._error is not None:
            return
        try:
            if self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._break("peer_lost", str(error))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._socket, wanted, self)

    def _receive(self) -> None:
        budget = _SLICE_BYTES
        while budget > 0 and self._error is None:
            try:
                taken = self._receive_body() if self._body_left else self._receive_head()
            except BlockingIOError:
                return
            if taken == 0:
                self._break("peer_lost", "connection closed by the peer")
            budget -= taken

    def _receive_head(self) -> int:
        size = RESPONSE.size if self._ready else WELCOME.size
        chunk = self._socket.recv(size - len(self._inbox))
        self._inbox += chunk
        if len(self._inbox) == size:
            head, self._inbox = bytes(self._inbox), bytearray()
            if self._ready:
                self._begin_body(head)
            else:
                self._welcomed(head)
        return len(chunk)

    def _welcomed(self, head: bytes) -> None:
        magic, accepted = WELCOME.unpack(head)
        if magic != MAGIC or not accepted:
            self._break("peer_lost", "the peer refused the connection")
        else:
            self._ready = True

    def _begin_body(self, head: bytes) -> None:
        number, granted, nbytes = RESPONSE.unpack(head)
        if not self._queue or self._queue[0].number != number:
            self._break("peer_lost", f"answer to transfer {number}, which is not the next")
            return
        transfer = self._queue[0]
        if not granted:
            transfer.fail("refused")
        elif nbytes != transfer.nbytes:
            transfer.fail("truncated")
        self._body_left = nbytes
        if nbytes == 0:
            self._end_body()

    def _receive_body(self) -> int:
        transfer = self._queue[0]
        if transfer.unfilled:
            views = list(itertools.islice(transfer.unfilled, _VIEWS_PER_CALL))
            taken = self._socket.recvmsg_into(views)[0]
            transfer.advance(taken)
        else:
            taken = self._socket.recv_into(self._scratch[: self._body_left])
        self._body_left -= taken
        if self._body_left == 0:
            self._end_body()
        return taken

    def _end_body(self) -> None:
        self._queue.popleft().finish()

    def _break(self, reason: str, error: str) -> None:
        """The connection is over, and with it every transfer on it."""
        if self._error is not None:
            return
        self._error = error
        self._selector.unregister(self._socket)
        self._socket.close()
        while self._queue:
            self._queue.popleft().fail(reason)
