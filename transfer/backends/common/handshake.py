# SPDX-License-Identifier: Apache-2.0
"""The handshake of two ranks: a reader names the engine that it means and proves that it was admitted.

The reader connects and sends HELLO; the server answers WELCOME or closes. Little endian, in this order:

    HELLO    magic, nonce of the engine that is meant, the backend's own bytes, token
    WELCOME  magic, 1 if accepted, the backend's own bytes

A backend whose library may block on a peer that is stopped, and holds the interpreter meanwhile, connects
only to a peer that has answered here. The nonce distinguishes a restarted peer from the one that was
described, the token is what many libraries do not check, and the end of the connection is the first sign of a
peer's death.
"""

from __future__ import annotations

import enum
import secrets
import selectors
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from kvferry.common.state_machine import Transitions, transition, transitions
from kvferry.transfer import access_tokens
from kvferry.transfer.access_tokens import TOKEN_BYTES
from kvferry.transfer.backends.common import sockets
from kvferry.transfer.backends.common.connection import Connection, ProtocolError
from kvferry.transfer.backends.common.sockets import Port
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.engine import PeerUnreachable

NONCE_BYTES = 16
_HANDSHAKE_S = 5.0
"""A reader that has not sent HELLO by then is disconnected."""
_MAX_SESSIONS = 1024


class HandshakeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's engine listens, and which engine it is."""

    host: str
    port: Port
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Protocol:
    """One backend's form of the handshake: its magic, and the sizes of its own bytes."""

    magic: bytes
    hello_bytes: int = 0
    welcome_bytes: int = 0

    @property
    def hello(self) -> struct.Struct:
        return struct.Struct(f"<4s{NONCE_BYTES}s{self.hello_bytes}s{TOKEN_BYTES}s")

    @property
    def welcome(self) -> struct.Struct:
        return struct.Struct(f"<4sB{self.welcome_bytes}s")


LIVENESS = Protocol(b"KVG1")
"""The protocol of backends that move their bytes elsewhere: the connection carries the handshake alone."""


class HandshakeServer:
    """Accepts readers; each becomes a session. `admit` sets the secret of the tokens that are accepted."""

    def __init__(
        self,
        host: str,
        selector: selectors.BaseSelector,
        protocol: Protocol = LIVENESS,
        new_session: Callable[[socket.socket, HandshakeServer], ServerSession] | None = None,
        max_sessions: int = _MAX_SESSIONS,
    ) -> None:
        """Raises OSError if the host cannot be bound."""
        self.selector = selector
        self.protocol = protocol
        self.sessions: list[ServerSession] = []
        self._new_session = new_session or ServerSession
        self._max_sessions = max_sessions
        self._secret: bytes | None = None
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._listener = sockets.listen(host)
        selector.register(self._listener, selectors.EVENT_READ, self)

    def admit(self, secret: bytes) -> None:
        self._secret = secret

    def address(self, host: str) -> HandshakeAddress:
        """What readers need, with the host that they must dial."""
        return HandshakeAddress(host=host, port=self._listener.getsockname()[1], nonce=self._nonce)

    def on_ready(self, events: int) -> None:
        """Accept a connection, unless there are too many."""
        connection = sockets.accept(self._listener)
        if connection is None:
            return
        self._forget_closed()
        if len(self.sessions) >= self._max_sessions:
            connection.close()
            return
        self.sessions.append(self._new_session(connection, self))

    def progress(self, now: float) -> None:
        for session in self.sessions:
            session.progress(now)
        self._forget_closed()

    def next_deadline(self) -> float | None:
        times = [session.next_deadline() for session in self.sessions]
        return min((each for each in times if each is not None), default=None)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.selector.unregister(self._listener)
        self._listener.close()

    def accepts(self, nonce: bytes, token: bytes) -> bool:
        """Whether a reader means this engine and was admitted by our engine process."""
        return nonce == self._nonce and self._secret is not None and access_tokens.verify(self._secret, token)

    def _forget_closed(self) -> None:
        self.sessions = [session for session in self.sessions if not session.closed]


class ServerSession(Connection):
    """One reader's connection."""

    def __init__(self, connection: socket.socket, server: HandshakeServer) -> None:
        super().__init__(connection, server.selector)
        self._server = server
        self._deadline: float | None = time.monotonic() + _HANDSHAKE_S
        """Set until the handshake is done."""

    def progress(self, now: float) -> None:
        """Disconnect a reader that sends no HELLO in time."""
        if self._deadline is not None and self._deadline <= now:
            self.close()

    def next_deadline(self) -> float | None:
        return self._deadline

    def _received(self, inbox: bytearray) -> None:
        if self._deadline is None:
            self._requested(inbox)
            return
        protocol = self._server.protocol
        if len(inbox) < protocol.hello.size:
            return
        magic, nonce, own, token = protocol.hello.unpack_from(inbox)
        del inbox[: protocol.hello.size]
        if magic != protocol.magic or not self._server.accepts(nonce, token):
            self.send(protocol.welcome.pack(protocol.magic, 0, b""))
            raise ProtocolError("not admitted")
        self._deadline = None
        self._queue(protocol.welcome.pack(protocol.magic, 1, self._accepted(own)))
        self._requested(inbox)

    def _accepted(self, hello: bytes) -> bytes:
        """Prepare what the backend serves. Takes and returns its own bytes of HELLO and WELCOME."""
        return b""

    def _requested(self, inbox: bytearray) -> None:
        """Remove complete requests from the inbox and act on them. May raise `ProtocolError`."""
        if inbox:
            raise ProtocolError("bytes after the handshake")

    def _ended(self, reason: str) -> None:
        self._deadline = None


class PeerState(enum.Enum):
    GREETING = "greeting"
    READY = "ready"
    """The peer is alive, is the one that was described, and has accepted us."""
    LOST = "lost"


PEER_TRANSITIONS: Transitions[PeerState] = transitions(
    {
        PeerState.GREETING: {PeerState.READY, PeerState.LOST},
        PeerState.READY: {PeerState.LOST},
    }
)

Read = TypeVar("Read", bound=BaseTransfer)


class HandshakePeer(Connection, Generic[Read]):
    """The reader's side: one producer rank; see `transfer.engine.Peer`.

    It ends with its connection, and its `transfers` fail with it. Raises `PeerUnreachable` for an address
    that is invalid.
    """

    def __init__(
        self,
        backend: str,
        address: HandshakeAddress,
        token: bytes,
        selector: selectors.BaseSelector,
        deadline: float,
        protocol: Protocol = LIVENESS,
        own: bytes = b"",
    ) -> None:
        super().__init__(sockets.dial(address.host, address.port), selector)
        self.state = PeerState.GREETING
        self.transfers: list[Read] = []
        """Reads that are not quiescent, and maybe some that are."""
        self._backend = backend
        self._protocol = protocol
        self._deadline = deadline
        self._error = ""
        self._queue(protocol.hello.pack(protocol.magic, address.nonce, own, token))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._backend} {self.state.value}>"

    def poll(self) -> bool:
        if self.state is PeerState.LOST:
            raise PeerUnreachable(f"{self._backend}: {self._error}")
        return self.state is PeerState.READY

    def progress(self, now: float) -> None:
        """End a handshake that has passed its deadline."""
        if self.state is PeerState.GREETING and self._deadline <= now:
            self._end("no handshake within the deadline")

    def next_deadline(self) -> float | None:
        return self._deadline if self.state is PeerState.GREETING else None

    @abstractmethod
    def _accepted(self, welcome: bytes) -> None:
        """Prepare what reads need. Takes the backend's own bytes of WELCOME.

        Raises `PeerUnreachable` if there is no way to read from this peer.
        """

    def _received(self, inbox: bytearray) -> None:
        welcome = self._protocol.welcome
        if self.state is PeerState.READY:
            raise ProtocolError("unexpected bytes from the peer")
        if len(inbox) < welcome.size:
            return
        magic, accepted, own = welcome.unpack_from(inbox)
        del inbox[: welcome.size]
        if magic != self._protocol.magic or accepted != 1:
            raise ProtocolError("refused by the peer")
        try:
            self._accepted(own)
        except PeerUnreachable as error:
            raise ProtocolError(str(error)) from error
        self._transition(PeerState.READY)

    def _ended(self, reason: str) -> None:
        self._transition(PeerState.LOST)
        self._error = reason
        for transfer in self.transfers:
            transfer.fail("peer_lost")

    def _transition(self, to: PeerState) -> None:
        self.state = transition(self, PEER_TRANSITIONS, self.state, to)
