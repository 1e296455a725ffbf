# SPDX-License-Identifier: Apache-2.0
"""The socket beside a pair's communicator. It carries requests, and its end is the end of the pair."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable

_CHUNK = 1 << 16


class BadPeer(Exception):
    """The peer broke the protocol, is not admitted, or has left."""


class PairSocket:
    """A connection that never blocks.

    `take` is given what has arrived and removes what it understands; it may raise `BadPeer`. `lost` is told
    why, once, when the connection is over, unless it was closed here.
    """

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        take: Callable[[bytearray], None],
        lost: Callable[[str], None],
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._selector = selector
        self._take = take
        self._lost = lost
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._closed = False
        selector.register(connection, selectors.EVENT_READ, self._on_ready)

    def send(self, message: bytes) -> None:
        """Queue a message; it leaves as the socket takes it, or after connecting."""
        if not self._closed:
            self._outbox += message
            self._selector.modify(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_ready)

    def _on_ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ:
                self._receive()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(os.strerror(error.errno or 0))
        except BadPeer as error:
            self._lose(str(error))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def _flush(self) -> None:
        if self._closed:
            return
        del self._outbox[: self._socket.send(self._outbox)]
        if not self._outbox:
            self._selector.modify(self._socket, selectors.EVENT_READ, self._on_ready)

    def _receive(self) -> None:
        if self._closed:
            return
        chunk = self._socket.recv(_CHUNK)
        if not chunk:
            raise BadPeer("it has left")
        self._inbox += chunk
        self._take(self._inbox)

    def _lose(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._lost(reason)
