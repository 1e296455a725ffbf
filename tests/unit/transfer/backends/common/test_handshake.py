# SPDX-License-Identifier: Apache-2.0
"""The connection that stands for a peer's being alive, and the one that was meant."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.transfer.access_tokens import TOKEN_BYTES, mint, new_secret
from kvferry.transfer.backends.common import handshake
from kvferry.transfer.backends.common.handshake import (
    HandshakeAddress,
    HandshakePeer,
    HandshakeServer,
    PeerState,
    Protocol,
    ServerSession,
)
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.engine import PeerUnreachable, Status

SECRET = new_secret()
PROTOCOL = Protocol(b"TEST", hello_bytes=5, welcome_bytes=7)


class Reader(HandshakePeer[BaseTransfer]):
    """A peer that keeps what the server says in WELCOME."""

    welcome: bytes | None = None
    unusable = False

    def _accepted(self, welcome: bytes) -> None:
        if self.unusable:
            raise PeerUnreachable("no way to its memory")
        self.welcome = welcome


class Echo(ServerSession):
    """Answers with the first bytes of HELLO's own, and two more."""

    def _accepted(self, hello: bytes) -> bytes:
        return hello + b"!!"


class Rig:
    """A server and its readers on one selector."""

    def __init__(self) -> None:
        self.selector = selectors.EpollSelector()
        self.server = self.new_server()
        self.address = self.server.address("127.0.0.1")

    def new_server(self) -> HandshakeServer:
        server = HandshakeServer("127.0.0.1", self.selector)
        server.admit(SECRET)
        return server

    def connect(self, token: bytes | None = None, timeout_s: float = 5.0) -> Reader:
        deadline = time.monotonic() + timeout_s
        return Reader("test", self.address, token or mint(SECRET), self.selector, deadline)

    def wait(self, condition: Callable[[], bool], *readers: Reader) -> None:
        deadline = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < deadline
            for key, events in self.selector.select(0.01):
                key.data.on_ready(events)
            self.server.progress(time.monotonic())
            for reader in readers:
                reader.progress(time.monotonic())


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.server.close()
    assert not made.selector.get_map(), "a socket was left behind"
    made.selector.close()


def test_a_reader_with_a_token_is_accepted_until_one_side_leaves(rig: Rig) -> None:
    reader = rig.connect()
    rig.wait(reader.poll)
    assert rig.server.next_deadline() is None
    assert reader.next_deadline() is None
    reader.close()
    other = rig.connect()
    rig.wait(other.poll)
    transfer = BaseTransfer(1, 1, time.monotonic() + 5.0)
    other.transfers.append(transfer)
    rig.server.close()
    rig.wait(lambda: other.state is PeerState.LOST)
    assert (transfer.poll(), transfer.reason) == (Status.FAILED, "peer_lost")
    with pytest.raises(PeerUnreachable, match="test: connection closed by the peer"):
        other.poll()
    rig.server = rig.new_server()


def test_a_stranger_is_refused(rig: Rig) -> None:
    """X22."""
    for token in (b"x" * TOKEN_BYTES, mint(new_secret())):
        reader = rig.connect(token=token)
        rig.wait(lambda reader=reader: reader.state is PeerState.LOST)
        with pytest.raises(PeerUnreachable, match="refused by the peer"):
            reader.poll()
    rig.server.progress(time.monotonic())
    assert not rig.server.sessions


def test_another_engine_at_the_same_port_is_not_taken_for_the_one_that_was_meant(rig: Rig) -> None:
    """X23: a restarted peer is another peer, whatever its address."""
    rig.address = HandshakeAddress(host="127.0.0.1", port=rig.address.port, nonce=b"o" * 16)
    reader = rig.connect()
    rig.wait(lambda: reader.state is PeerState.LOST)


def test_a_silent_connection_is_closed_and_nonsense_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_HANDSHAKE_S", 0.05)
    for sent in (b"", b"GET / HTTP/1.1\r\n" * 10):
        with socket.create_connection(("127.0.0.1", rig.address.port)) as stranger:
            stranger.setblocking(False)
            stranger.send(sent)
            rig.wait(lambda stranger=stranger: _is_closed(stranger))
    assert rig.server.next_deadline() is None


def test_bytes_behind_the_handshake_end_a_connection_that_carries_nothing(rig: Rig) -> None:
    reader = rig.connect()
    rig.wait(reader.poll)
    reader.send(b"?")
    rig.wait(lambda: reader.state is PeerState.LOST)


def test_a_server_that_never_answers_is_given_up_by_the_deadline() -> None:
    """X13."""
    selector = selectors.EpollSelector()
    with socket.create_server(("127.0.0.1", 0)) as silent, selector:
        address = HandshakeAddress(host="127.0.0.1", port=silent.getsockname()[1], nonce=bytes(16))
        reader = Reader("test", address, mint(SECRET), selector, time.monotonic() + 0.05)
        deadline = reader.next_deadline()
        assert deadline is not None
        reader.progress(deadline)
        with pytest.raises(PeerUnreachable, match="no handshake within the deadline"):
            reader.poll()


def test_a_peer_that_cannot_be_used_is_lost_with_the_reason(rig: Rig) -> None:
    reader = rig.connect()
    reader.unusable = True
    rig.wait(lambda: reader.state is PeerState.LOST)
    with pytest.raises(PeerUnreachable, match="no way to its memory"):
        reader.poll()


def test_a_backend_s_own_bytes_go_both_ways(rig: Rig) -> None:
    server = HandshakeServer("127.0.0.1", rig.selector, PROTOCOL, Echo)
    server.admit(SECRET)
    address = server.address("127.0.0.1")
    deadline = time.monotonic() + 5.0
    reader = Reader("test", address, mint(SECRET), rig.selector, deadline, PROTOCOL, b"hello")
    rig.wait(reader.poll, reader)
    assert reader.welcome == b"hello!!"
    reader.close()
    server.close()


def test_no_more_readers_than_allowed_are_served(rig: Rig) -> None:
    server = HandshakeServer("127.0.0.1", rig.selector, max_sessions=1)
    server.admit(SECRET)
    rig.address = server.address("127.0.0.1")
    first = rig.connect()
    rig.wait(first.poll)
    second = rig.connect()
    rig.wait(lambda: second.state is PeerState.LOST)
    first.close()
    server.close()


def test_an_address_that_makes_no_sense_is_unreachable() -> None:
    address = HandshakeAddress(host="no-such-host.invalid", port=1, nonce=bytes(16))
    with selectors.EpollSelector() as selector, pytest.raises(PeerUnreachable, match="no-such-host"):
        Reader("test", address, mint(SECRET), selector, time.monotonic())


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
