# SPDX-License-Identifier: Apache-2.0
"""A connection between two ranks: a socket on a selector that never blocks the transfer thread."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

TURN_BYTES = 8 << 20
"""Bytes that one connection moves before the others get their turn."""
_VIEWS_PER_CALL = 64
_CHUNK_BYTES = 1 << 16


class ProtocolError(Exception):
    """The peer broke the protocol, is not admitted, or has closed the connection, which ends here."""


class Connection(ABC):
    """Buffers both directions and calls `_ended` once, when the connection is over."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.closed = False
        self._socket = connection
        self._selector = selector
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        self._events = selectors.EVENT_READ
        selector.register(connection, self._events, self)

    def on_ready(self, events: int) -> None:
        """Move bytes. The socket can be read or written."""
        if events & selectors.EVENT_READ:
            self._attempt(self._receive)
        self._attempt(self._send)

    def send(self, *views: bytes | memoryview) -> None:
        """Send in order, now or when the socket takes more; nothing if the connection has ended."""
        if not self.closed:
            self._queue(*views)
            self._attempt(self._send)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._end("closed")

    @abstractmethod
    def _received(self, inbox: bytearray) -> None:
        """Remove complete messages from the inbox and act on them. May raise `ProtocolError`."""

    @abstractmethod
    def _ended(self, reason: str) -> None:
        """Clean up: the socket is closed."""

    def _queue(self, *views: bytes | memoryview) -> None:
        """Send in order, from the next `on_ready` on."""
        self._outbox.extend(memoryview(view) for view in views if len(view))
        self._watch()

    def _attempt(self, move: Callable[[], None]) -> None:
        if self.closed:
            return
        try:
            move()
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(os.strerror(error.errno or 0))
        except ProtocolError as error:
            self._end(str(error))
        self._watch()

    def _send(self) -> None:
        """Send a turn's bytes of the outbox. Raises BlockingIOError when the socket takes no more."""
        budget = TURN_BYTES
        while self._outbox and budget > 0:
            budget -= self._send_some()

    def _send_some(self) -> int:
        sent = left = self._socket.sendmsg(itertools.islice(self._outbox, _VIEWS_PER_CALL))
        while left:
            view = self._outbox.popleft()
            if left < len(view):
                self._outbox.appendleft(view[left:])
                break
            left -= len(view)
        return sent

    def _receive(self) -> None:
        chunk = self._socket.recv(_CHUNK_BYTES)
        if not chunk:
            raise ProtocolError("connection closed by the peer")
        self._inbox += chunk
        self._received(self._inbox)

    def _wanted_events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)

    def _watch(self) -> None:
        if not self.closed and self._events != self._wanted_events():
            self._events = self._wanted_events()
            self._selector.modify(self._socket, self._events, self)

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._socket)
            self._socket.close()
            self._ended(reason)
