# SPDX-License-Identifier: Apache-2.0
"""The connection that a reader keeps to a producer rank whose memory it reads without its help.

A library may block on a peer that is stopped, and hold the interpreter while it does: that would stop this
rank's model too. So a reader first greets the peer here, without blocking, and only one that answers is
connected to. The greeting also tells who is there (another process may have got a dead one's port), carries
the token that the data plane does not ask for, and its end is the first sign of a peer's death.
"""

from __future__ import annotations

import enum
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable

import msgspec

from kvferry.transfer.backends.common import sockets
from kvferry.transfer.backends.common.address import Port
from kvferry.transfer.backends.tcp.wire import GREETING, NONCE_BYTES, WELCOME

_MAGIC = b"KVG1"
_MAX_VISITORS = 1024
_GREETING_S = 5.0
"""A connection that has not said who it is by then is closed."""


class GreetingAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank takes greetings, and which engine it is."""

    host: str
    port: Port
    nonce: bytes


class Doorkeeper:
    """The producer's side: answers readers, and notices when they leave."""

    def __init__(self, host: str, selector: selectors.BaseSelector, admits: Callable[[bytes], bool]) -> None:
        self._selector = selector
        self._admits = admits
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._visitors: list[_Visitor] = []
        self._listener = sockets.listen(host)
        selector.register(self._listener, selectors.EVENT_READ, self)

    def address(self, host: str) -> GreetingAddress:
        """What a reader is told, with the host that it must dial."""
        return GreetingAddress(host=host, port=self._listener.getsockname()[1], nonce=self._nonce)

    def on_ready(self, events: int) -> None:
        """Somebody knocks."""
        connection = sockets.accept(self._listener)
        if connection is None:
            return
        self._visitors = [visitor for visitor in self._visitors if not visitor.closed]
        if len(self._visitors) >= _MAX_VISITORS:
            connection.close()
            return
        self._visitors.append(_Visitor(connection, self._selector, self._expects))

    def expire(self, now: float) -> None:
        """Close connections that keep silent about who they are."""
        for visitor in self._visitors:
            visitor.expire(now)

    def next_deadline(self) -> float | None:
        times = [visitor.deadline for visitor in self._visitors if visitor.deadline is not None]
        return min(times, default=None)

    def close(self) -> None:
        for visitor in self._visitors:
            visitor.close()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _expects(self, greeting: bytes) -> bool:
        magic, nonce, token = GREETING.unpack(greeting)
        return magic == _MAGIC and nonce == self._nonce and self._admits(token)


class _Visitor:
    """One reader's connection. `deadline` is set until it has greeted."""

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, expects: Callable[[bytes], bool]
    ) -> None:
        self.closed = False
        self.deadline: float | None = time.monotonic() + _GREETING_S
        self._socket = connection
        self._selector = selector
        self._expects = expects
        self._inbox = b""
        selector.register(connection, selectors.EVENT_READ, self)

    def on_ready(self, events: int) -> None:
        try:
            received = self._socket.recv(GREETING.size)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self._inbox += received
        if not received or len(self._inbox) > GREETING.size:
            self.close()
        elif len(self._inbox) == GREETING.size:
            self._answer()

    def expire(self, now: float) -> None:
        if self.deadline is not None and self.deadline <= now:
            self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.deadline = None
            self._selector.unregister(self._socket)
            self._socket.close()

    def _answer(self) -> None:
        admitted = self._expects(self._inbox)
        self.deadline = None
        try:
            self._socket.send(WELCOME.pack(_MAGIC, admitted))  # the first bytes on it: they fit
        except OSError:
            admitted = False
        if not admitted:
            self.close()


class VisitState(enum.Enum):
    GREETING = "greeting"
    WELCOME = "welcome"
    """The peer is alive, and the one that was described."""
    LOST = "lost"


class Visit:
    """The reader's side of one connection. Raises `PeerUnreachable` for an address that makes no sense."""

    def __init__(
        self, address: GreetingAddress, token: bytes, selector: selectors.BaseSelector, deadline: float
    ) -> None:
        self.state = VisitState.GREETING
        self.error = ""
        self._selector = selector
        self._deadline = deadline
        self._outbox = GREETING.pack(_MAGIC, address.nonce, token)
        self._inbox = b""
        self._socket = sockets.dial(address.host, address.port)
        selector.register(self._socket, selectors.EVENT_WRITE, self)

    def on_ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send()
            if events & selectors.EVENT_READ:
                self._receive()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(os.strerror(error.errno or 0))

    def expire(self, now: float) -> None:
        if self.state is VisitState.GREETING and self._deadline <= now:
            self._lose("no greeting within the deadline")

    def next_deadline(self) -> float | None:
        return self._deadline if self.state is VisitState.GREETING else None

    def close(self) -> None:
        self._lose("closed")

    def _send(self) -> None:
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        self._outbox = self._outbox[self._socket.send(self._outbox) :]
        if not self._outbox:
            self._selector.modify(self._socket, selectors.EVENT_READ, self)

    def _receive(self) -> None:
        received = self._socket.recv(WELCOME.size)
        self._inbox += received
        if not received:
            self._lose("connection closed by the peer")
        elif self.state is VisitState.GREETING and len(self._inbox) >= WELCOME.size:
            if self._inbox == WELCOME.pack(_MAGIC, 1):
                self.state = VisitState.WELCOME
            else:
                self._lose("refused by the peer")

    def _lose(self, why: str) -> None:
        if self.state is not VisitState.LOST:
            self.state = VisitState.LOST
            self.error = why
            self._selector.unregister(self._socket)
            self._socket.close()
