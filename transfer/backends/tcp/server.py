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

from kvferry.transfer.backends.tcp.fault import Fault, FaultInjector, flip
from kvferry.transfer.backends.tcp.wire import GREETING, MAGIC, MAX_PIECES, PIECE, REQUEST, RESPONSE, WELCOME
from kvferry.transfer.memory import PoolMemory

_VIEWS_PER_CALL = 64
_SLICE_BYTES = 8 << 20
_GREETING_S = 5.0
"""A connection that has not said who it is by then is closed."""


class _Phase(enum.Enum):
    GREETING = "greeting"
    SERVING = "serving"
    DELAYED = "delayed"
    """A fault holds the next bytes back until they are due."""
    STALLED = "stalled"
    """A fault keeps the connection open and silent for good."""
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
        faults: FaultInjector,
        item_bytes: int,
    ) -> None:
        self._socket = connection
        self._selector = selector
        self._memory = memory
        self._check = check
        self._faults = faults
        self._item_bytes = item_bytes
        self._phase = _Phase.GREETING
        self._due = time.monotonic() + _GREETING_S
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        self._held: list[memoryview] = []
        """A response that a fault keeps back until the next one, or until it is due."""
        self._after_this = _Phase.SERVING
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
        """End an idle stranger, or the delay that a fault asked for."""
        if self._phase is _Phase.GREETING and self._due <= now:
            self.close()
        elif self._phase is _Phase.DELAYED and self._due <= now:
            self._phase = _Phase.SERVING
            self._selector.register(self._socket, selectors.EVENT_WRITE, self)
        elif self._phase is _Phase.SERVING and self._held and self._due <= now:
            self._outbox.extend(self._held)
            self._held.clear()
            self._selector.modify(self._socket, selectors.EVENT_WRITE, self)

    def next_deadline(self) -> float | None:
        waits = self._phase in (_Phase.GREETING, _Phase.DELAYED)
        return self._due if waits or (self._phase is _Phase.SERVING and self._held) else None

    def close(self) -> None:
        if self.closed:
            return
        if self._phase in (_Phase.GREETING, _Phase.SERVING):
            self._selector.unregister(self._socket)
        self._phase = _Phase.CLOSED
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
        while budget > 0 and self._phase in (_Phase.GREETING, _Phase.SERVING):
            if self._outbox:
                sent = self._send()
                if sent == 0:
                    break
                budget -= sent
            elif not self._next_message():
                self._selector.modify(self._socket, selectors.EVENT_READ, self)
                return
        if self._phase in (_Phase.GREETING, _Phase.SERVING):
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
        if not self._outbox:
            self._end_stream()
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
        self._respond(number, pieces)
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

    def _respond(self, number: int, pieces: list[tuple[int, int]]) -> None:
        size = self._memory.nbytes
        if any(offset + length > size for offset, length in pieces) or sum(n for _, n in pieces) > size:
            self._outbox.append(memoryview(RESPONSE.pack(number, 0, 0)))
            return
        body = self._memory.readable(pieces)
        total = sum(map(len, body))
        fault = self._faults.draw()
        if fault is not None:
            body, total = self._damage(body, total, fault)
        response = [memoryview(RESPONSE.pack(number, 1, total)), *(view for view in body if len(view))]
        if fault is not None and fault.kind == "reorder" and not self._held:
            self._held = response
            self._due = time.monotonic() + fault.seconds
            return
        self._outbox.extend(response)
        self._outbox.extend(self._held)
        self._held.clear()

    def _damage(self, body: list[memoryview], total: int, fault: Fault) -> tuple[list[memoryview], int]:
        """What a fault makes of a response: the bytes to send, and how many to announce."""
        if fault.kind == "flip":
            return flip(body, fault, self._item_bytes), total
        if fault.kind == "delay":
            self._phase = _Phase.DELAYED
            self._due = time.monotonic() + fault.seconds
            self._selector.unregister(self._socket)
            return body, total
        if fault.kind == "reorder":
            return body, total
        body = _first(body, fault.after)
        if fault.kind == "truncate":
            return body, sum(map(len, body))
        self._after_this = _Phase.CLOSED if fault.kind == "drop" else _Phase.STALLED
        return body, total

    def _end_stream(self) -> None:
        """The outbox is empty. A fault may have decided that nothing follows."""
        if self._after_this is _Phase.CLOSED:
            self.close()
        elif self._after_this is _Phase.STALLED:
            self._selector.unregister(self._socket)
            self._phase = _Phase.STALLED


def _first(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The first bytes of a stream."""
    kept = []
    for view in views:
        if nbytes <= 0:
            break
        kept.append(view[:nbytes])
        nbytes -= len(view)
    return kept
