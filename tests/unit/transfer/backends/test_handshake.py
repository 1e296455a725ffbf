# SPDX-License-Identifier: Apache-2.0
"""The connection that stands for a peer's being alive, and the one that was meant."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.transfer.backends.common import handshake as greeting
from kvferry.transfer.backends.common.handshake import Doorkeeper, Visit, VisitState
from kvferry.transfer.engine import PeerUnreachable
from kvferry.transfer.tokens import TOKEN_BYTES

TOKEN = b"t" * TOKEN_BYTES


class Hall:
    """A doorkeeper and its visitors on one selector."""

    def __init__(self) -> None:
        self.selector = selectors.EpollSelector()
        self.door = Doorkeeper("127.0.0.1", self.selector, lambda token: token == TOKEN)
        self.address = self.door.address("127.0.0.1")

    def visit(self, token: bytes = TOKEN, timeout_s: float = 5.0) -> Visit:
        return Visit(self.address, token, self.selector, time.monotonic() + timeout_s)

    def wait(self, condition: Callable[[], bool], *visits: Visit) -> None:
        deadline = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < deadline
            for key, events in self.selector.select(0.01):
                key.data.on_ready(events)
            for each in (self.door, *visits):
                each.expire(time.monotonic())


@pytest.fixture
def hall() -> Iterator[Hall]:
    made = Hall()
    yield made
    made.door.close()
    assert not made.selector.get_map(), "a socket was left behind"
    made.selector.close()


def test_a_visitor_with_a_token_is_welcome_until_one_side_leaves(hall: Hall) -> None:
    visit = hall.visit()
    hall.wait(lambda: visit.state is VisitState.WELCOME)
    assert hall.door.next_deadline() is None
    assert visit.next_deadline() is None
    visit.close()
    other = hall.visit()
    hall.wait(lambda: other.state is VisitState.WELCOME)
    hall.door.close()
    hall.wait(lambda: other.state is VisitState.LOST)
    assert other.error
    hall.door = Doorkeeper("127.0.0.1", hall.selector, lambda token: False)


def test_a_stranger_is_refused(hall: Hall) -> None:
    """X22."""
    visit = hall.visit(token=b"x" * TOKEN_BYTES)
    hall.wait(lambda: visit.state is VisitState.LOST)
    assert visit.error == "refused by the peer"


def test_another_engine_at_the_same_port_is_not_taken_for_the_one_that_was_meant(hall: Hall) -> None:
    """X23: a restarted peer is another peer, whatever its address."""
    hall.address = greeting.GreetingAddress(host="127.0.0.1", port=hall.address.port, nonce=b"o" * 16)
    visit = hall.visit()
    hall.wait(lambda: visit.state is VisitState.LOST)


def test_a_silent_connection_is_closed_and_nonsense_too(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "_GREETING_S", 0.05)
    for said in (b"", b"GET / HTTP/1.1\r\n" * 10):
        with socket.create_connection(("127.0.0.1", hall.address.port)) as stranger:
            stranger.setblocking(False)
            stranger.send(said)
            hall.wait(lambda stranger=stranger: _is_closed(stranger))
    assert hall.door.next_deadline() is None


def test_a_door_that_never_answers_is_given_up_by_the_deadline() -> None:
    """X13."""
    selector = selectors.EpollSelector()
    with socket.create_server(("127.0.0.1", 0)) as silent, selector:
        address = greeting.GreetingAddress(host="127.0.0.1", port=silent.getsockname()[1], nonce=bytes(16))
        visit = Visit(address, TOKEN, selector, time.monotonic() + 0.05)
        deadline = visit.next_deadline()
        assert deadline is not None
        visit.expire(deadline)
        assert (visit.state, visit.error) == (VisitState.LOST, "no greeting within the deadline")


def test_an_address_that_makes_no_sense_is_unreachable() -> None:
    address = greeting.GreetingAddress(host="no-such-host.invalid", port=1, nonce=bytes(16))
    with selectors.EpollSelector() as selector, pytest.raises(PeerUnreachable, match="no-such-host"):
        Visit(address, TOKEN, selector, time.monotonic())


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
