# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 from agents, however its bytes are split, and when they are invalid."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from contextlib import suppress
from typing import Any, cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proxy.http.upstream_connection import (
    MAX_BUFFERED_BYTES,
    MAX_TURN_BYTES,
    ConnectionBroken,
    ConnectionState,
    UpstreamConnection,
)

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
UNTIL_END = b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhello"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH


class Wire:
    """Stands in for the transport: records its calls."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_reading = True
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def connected() -> tuple[UpstreamConnection, Wire, list[UpstreamConnection]]:
    closed: list[UpstreamConnection] = []
    connection, wire = UpstreamConnection(closed.append), Wire()
    connection.connection_made(cast(Any, wire))
    return connection, wire, closed


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


@pytest.mark.parametrize("raw", [LENGTH, CHUNKED, UNTIL_END, CONTINUED])
@given(cuts=st.lists(st.integers(0, 90), max_size=8), early=st.booleans())
@settings(deadline=None)
def test_a_response_is_complete_however_its_bytes_are_split(raw: bytes, cuts: list[int], early: bool) -> None:
    async def run() -> None:
        connection, _, _ = connected()
        connection.send(b"request", soon())
        taken: list[bytes] = []
        edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
        for start, end in itertools.pairwise(edges):
            connection.data_received(raw[start:end])
            if early and connection.state is ConnectionState.BODY:
                connection.stream_to(taken.append)
        if raw is UNTIL_END:
            connection.connection_lost(None)
        await connection.read_headers()
        assert (connection.status, connection.headers[b"x-a"]) == (200, b"b")
        connection.stream_to(taken.append)
        await connection.wait_complete()
        assert b"".join(taken) == b"hello"
        assert connection.reusable is (raw is not UNTIL_END)
        connection.close()

    asyncio.run(run())


@pytest.mark.parametrize("upto", [0, 10, len(CHUNKED) - 3])
async def test_a_truncated_response_is_never_complete(upto: int) -> None:
    """L10, X14: neither its head nor its body is complete."""
    connection, _, closed = connected()
    connection.send(b"request", soon())
    connection.data_received(CHUNKED[:upto])
    connection.connection_lost(None)
    with pytest.raises(ConnectionBroken):
        await connection.read_headers()
        connection.stream_to(lambda piece: None)
        await connection.wait_complete()
    assert closed == [connection]


@pytest.mark.parametrize(
    "noise", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n..", b"\0" * 50]
)
async def test_invalid_http_closes_the_connection(noise: bytes) -> None:
    connection, wire, closed = connected()
    connection.send(b"request", soon(0.2))
    connection.data_received(noise)
    with pytest.raises((ConnectionBroken, TimeoutError)):
        await connection.read_headers()
    assert wire.is_aborted and closed == [connection]


async def test_deadlines_hold_also_after_earlier_ones_were_moved_back() -> None:
    """One timer serves all: it may go off early, and must then be set again."""
    connection, wire, _ = connected()
    for limit in (0.01, 0.05):
        connection.send(b"request", soon(limit))
        connection.data_received(LENGTH)
        await connection.read_headers()
        connection.stream_to(lambda piece: None)
        await connection.wait_complete()
        connection.reset()
        await asyncio.sleep(2 * limit)
        assert not wire.is_aborted, "a deadline outlived its request"
    connection.send(b"request", soon(0.05))
    with pytest.raises(TimeoutError):
        await connection.read_headers()


async def test_the_idle_timeout_stops_while_the_client_is_slow() -> None:
    connection, _, _ = connected()
    connection.send(b"request", soon())
    connection.data_received(CHUNKED[:-10])
    connection.stream_to(lambda piece: None)
    connection.set_deadline(soon(), idle_timeout_s=0.05)
    connection.pause()
    await asyncio.sleep(0.2)
    assert connection.state is ConnectionState.BODY
    connection.resume()
    with pytest.raises(TimeoutError):
        await connection.wait_complete()


async def test_a_body_that_is_not_read_is_buffered_up_to_a_limit() -> None:
    """Never unbounded memory."""
    connection, wire, _ = connected()
    connection.send(b"request", soon())
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(MAX_BUFFERED_BYTES // MAX_TURN_BYTES):
        await asyncio.sleep(0)
        connection.data_received(b"x" * MAX_TURN_BYTES)
    assert wire.is_reading
    await asyncio.sleep(0)
    connection.data_received(b"x")
    assert not wire.is_reading
    size = 0

    def take(piece: bytes) -> None:
        nonlocal size
        size += len(piece)

    connection.stream_to(take)
    assert wire.is_reading and size == MAX_BUFFERED_BYTES + 1
    connection.close()


async def test_what_the_sink_raises_closes_the_connection_and_is_reraised() -> None:
    connection, wire, _ = connected()
    connection.send(b"request", soon())
    connection.data_received(CHUNKED[:-10])

    def refuse(piece: bytes) -> None:
        raise KeyError("no")

    connection.stream_to(refuse)
    with pytest.raises(KeyError):
        await connection.wait_complete()
    assert wire.is_aborted


class Flood(threading.Thread):
    """A server that answers every request with a body without end, from a thread of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def run(self) -> None:
        client, _ = self._listener.accept()
        self._listener.close()
        piece = memoryview(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        with client, suppress(OSError):
            client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                client.sendall(piece)


def test_one_connection_delivers_a_bounded_share_of_a_turn_of_the_loop() -> None:
    """uvloop reads a socket up to 32 times, 256 KB each, before it looks at any other."""

    async def run() -> None:
        flood = Flood()
        flood.start()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: UpstreamConnection(lambda _: None), "127.0.0.1", flood.port
        )
        connection.send(b"GET / HTTP/1.1\r\n\r\n", soon(20))
        await connection.read_headers()
        connection.pause()
        await asyncio.sleep(0.3)  # the kernel's buffers fill
        size, shares = 0, [0]

        def take(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            shares[-1] += len(piece)

        def turn() -> None:
            shares.append(0)
            if size < 64 * MAX_TURN_BYTES:
                loop.call_soon(turn)
            else:
                connection.close()

        connection.stream_to(take)
        shares[-1] = 0  # what was buffered came at once
        loop.call_soon(turn)
        connection.resume()
        with pytest.raises(ConnectionBroken):
            await connection.wait_complete()
        assert size >= 64 * MAX_TURN_BYTES
        assert max(shares) <= 2 * MAX_TURN_BYTES

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("slow", [False, True])
async def test_what_a_turn_could_not_take_comes_later_and_in_order(slow: bool) -> None:
    """Even if the client stops reading meanwhile, or the server hangs up."""
    connection, wire, _ = connected()
    connection.send(b"request", soon())
    body = bytes(range(256)) * (3 * MAX_TURN_BYTES // 256)
    taken: list[bytes] = []
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
    connection.stream_to(taken.append)
    connection.data_received(body[: 2 * MAX_TURN_BYTES])
    assert not wire.is_reading and len(b"".join(taken)) <= MAX_TURN_BYTES
    if slow:
        connection.pause()
        await asyncio.sleep(0.01)
        assert not wire.is_reading and len(b"".join(taken)) <= MAX_TURN_BYTES
        connection.resume()
    while not wire.is_reading:
        await asyncio.sleep(0)
    assert b"".join(taken) == body[: 2 * MAX_TURN_BYTES]
    connection.data_received(body[2 * MAX_TURN_BYTES :])
    connection.data_received(b"")
    connection.connection_lost(None)
    await connection.wait_complete()
    assert b"".join(taken) == body


async def test_a_connection_with_more_than_its_response_is_not_used_again() -> None:
    connection, _, _ = connected()
    connection.send(b"request", soon())
    connection.stream_to(lambda piece: None)
    body = b"x" * (MAX_TURN_BYTES - 100)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.data_received(head + body + b"HTTP/1.1 200 OK\r\n" * 100)
    assert not connection.reusable
    connection.close()
