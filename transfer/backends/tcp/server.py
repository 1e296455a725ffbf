# SPDX-License-Identifier: Apache-2.0
"""The serving side of the tcp backend: one connection of a peer that reads from our pool."""

from __future__ import annotations

import enum
import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable

from kvferry.transfer.backends.tcp.wire import GREETING, MAGIC, MAX_PIECES, PIECE, REQUEST, RESPONSE, WELCOME
from kvferry.transfer.memory import PoolMemory

_VIEWS_PER_CALL = 64
_SLICE_BYTES = 8 << 20
_GREETING_S = 5.0
"""A connection that has not said who it is by then is closed."""


class _Phase(enum.Enum):
    GREETING = "greeting"
    SERVING = "serving"
    CLOSED = "closed"


class BadPeer(Exception):
    """The peer broke the protocol or is not admitted; its connection ends."""


class ServedConnection:
    """Answers one peer's requests in order, one at a time. `check` tells whether a greeting is admitted."""

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        memory: PoolMemory,
        check: Callable[[bytes, bytes], bool],
    ) -> None:
        self._socket = connection
        self._selector = selector
        self._memory = memory
        self._check = check
        self._phase = _Phase.GREETING
        self._deadline = time.monotonic() + _GREETING_S
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        selector.register(connection, selectors.EVENT_READ, self)

    @property
    def closed(self) -> bool:
        return self._phase is _Phase.CLOSED

    def on_ready(self, events: int) -> None:
        """The socket can be read or written."""
        try:
            if events & selectors.EVENT_READ:
                self._receive()
            self._advance()
        except (OSError, BadPeer):
            self.close()

    def expire(self, now: float) -> None:
        """Close a connection that has not greeted in time."""
        if self._phase is _Phase.GREETING and self._deadline <= now:
            self.close()

    def next_deadline(self) -> float | None:
        return self._deadline if self._phase is _Phase.GREETING else None

    def close(self) -> None:
        if not self.closed:
            self._phase = _Phase.CLOSED
            self._selector.unregister(self._socket)
            self._socket.close()

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            raise BadPeer("it has left")
        self._inbox += chunk

    def _advance(self) -> None:
        """Send what is to be sent, then take the next request, until neither is possible."""
        budget = _SLICE_BYTES
        while budget > 0 and not self.closed:
            if self._outbox:
                sent = self._send()
                if sent == 0:
                    break
                budget -= sent
            elif not self._next_message():
                self._selector.modify(self._socket, selectors.EVENT_READ, self)
                return
        if not self.closed:
            self._selector.modify(self._socket, selectors.EVENT_WRITE, self)

    def _send(self) -> int:
        """Send some of the outbox; 0 when the socket takes nothing now."""
        try:
            sent = self._socket.sendmsg(itertools.islice(self._outbox, _VIEWS_PER_CALL))
        except BlockingIOError:
            return 0
        left = sent
        while left:
            view = self._outbox.popleft()
            if left < len(view):
                self._outbox.appendleft(view[left:])
                break
            left -= len(view)
        return sent

    def _next_message(self) -> bool:
        """Act on the next complete message of the inbox; false if there is none."""
        if self._phase is _Phase.GREETING:
            return self._greet()
        if len(self._inbox) < REQUEST.size:
            return False
        number, count = REQUEST.unpack_from(self._inbox)
        if count > MAX_PIECES:
            raise BadPeer(f"{count} pieces")
        size = REQUEST.size + count * PIECE.size
        if len(self._inbox) < size:
            return False
        pieces = list(PIECE.iter_unpack(bytes(self._inbox[REQUEST.size : size])))
        del self._inbox[:size]
        size = self._memory.nbytes
        if any(offset + length > size for offset, length in pieces) or sum(n for _, n in pieces) > size:
            self._outbox.append(memoryview(RESPONSE.pack(number, 0, 0)))
        else:
            self._respond(number, self._memory.readable(pieces), sum(length for _, length in pieces))
        return True

    def _greet(self) -> bool:
        if len(self._inbox) < GREETING.size:
            return False
        magic, nonce, token = GREETING.unpack_from(self._inbox)
        del self._inbox[: GREETING.size]
        if magic != MAGIC or not self._check(nonce, token):
            raise BadPeer("not admitted")
        self._phase = _Phase.SERVING
        self._outbox.append(memoryview(WELCOME.pack(MAGIC, 1)))
        return True

    def _respond(self, number: int, body: list[memoryview], nbytes: int) -> None:
        """Queue the response to a request that is granted."""
        self._outbox.append(memoryview(RESPONSE.pack(number, 1, nbytes)))
        self._outbox.extend(view for view in body if len(view))
