# SPDX-License-Identifier: Apache-2.0
"""The guard of a server's connections, with an application that reads as Quart does."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import uvicorn

from kvferry.common.http.server import (
    MAX_CHUNKS,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    MAX_TURN_BYTES,
    GuardedConnection,
    HttpServer,
    ServerBounds,
)
from tests.helpers.waiting import until

WAIT_S = 20.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(slots=True)
class Held:
    """Responds to a request when its gate opens; asks for more of its body meanwhile."""

    port: int = 0
    gates: list[asyncio.Event] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    answer: bytes = b"ok"
    has_length: bool = True
    """Whether it says how long its responses are."""
    server: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gate = asyncio.Event()
        self.scopes.append(scope)
        self.gates.append(gate)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        asking = asyncio.ensure_future(receive())
        await gate.wait()
        asking.cancel()
        headers = [(b"content-length", b"%d" % len(self.answer))] if self.has_length else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for byte in self.answer[:2]:
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
        await send({"type": "http.response.body", "body": self.answer[2:]})

    @property
    def connection(self) -> GuardedConnection:
        (connection,) = self.server.server_state.connections
        return cast(GuardedConnection, connection)


@asynccontextmanager
async def served(
    head_s: float = 2 * WAIT_S,
    bounds: ServerBounds | None = None,
    connection: Callable[..., GuardedConnection] = GuardedConnection,
) -> AsyncIterator[Held]:
    app = Held()
    app.server = HttpServer(
        uvicorn.Config(
            app,
            http=cast(Any, partial(connection, head_s=head_s, bounds=bounds or ServerBounds())),
            ws="none",
            lifespan="off",
            log_config=None,
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app.port = listener.getsockname()[1]
        serving = asyncio.create_task(app.server.serve(sockets=[listener]))
        try:
            yield app
        finally:
            for gate in app.gates:
                gate.set()
            app.server.should_exit = app.server.force_exit = True
            await serving


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    async with asyncio.timeout(WAIT_S):
        with suppress(ConnectionResetError):
            while more := await reader.read(2**16):
                received += more
    return received


async def test_a_connection_with_queued_requests_is_not_read() -> None:
    """D1: neither after each response, nor as the application asks for more of a body."""
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(GET * 3)
        await until(lambda: app.gates)
        transport = app.connection.transport
        await until(lambda: len(app.connection.pipeline) == 2)
        for index in range(3):
            await until(lambda index=index: len(app.gates) == index + 1)
            await asyncio.sleep(0.02)
            assert transport.is_reading() is (index == 2)
            app.gates[index].set()
            async with asyncio.timeout(WAIT_S):
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        writer.write(GET)
        await until(lambda: len(app.gates) == 4)
        writer.close()


async def test_a_body_behind_a_queued_request_is_read_in_its_turn() -> None:
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        size = 2**20
        writer.write(GET * 2 + b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        writer.write(b"a" * size + GET)
        for index in range(4):
            await until(lambda index=index: len(app.gates) == index + 1)
            app.gates[index].set()
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"ok")
        writer.close()


async def test_too_many_pipelined_requests_close_the_connection() -> None:
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(GET * (MAX_PIPELINED + 10))
        assert await rest(reader) == b""
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT"], ids=["nothing", "half a head"])
async def test_a_head_has_a_deadline(sent: bytes) -> None:
    async with served(head_s=0.2) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(sent)
        assert (await rest(reader))[:13] == (b"HTTP/1.1 408 " if sent else b"")
        writer.close()


async def test_a_head_has_a_size() -> None:
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Pad: ".ljust(MAX_HEAD_BYTES + 1, b"a"))
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "head_too_large"
        writer.close()


async def test_a_malformed_request_gets_a_typed_error() -> None:
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"NOT HTTP\r\n\r\n")
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "bad_request"
        writer.close()


async def test_trailers_are_no_headers() -> None:
    """D9: a key sent as one opened the API."""
    async with served() as app:
        _, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"1\r\na\r\n0\r\nAuthorization: Bearer k\r\n\r\n")
        await until(lambda: app.scopes and not app.connection.cycle.more_body)
        assert [name for name, _ in app.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]
        writer.close()


@pytest.mark.parametrize("hosts", [b"", b"Host: x\r\nHost: y\r\n"], ids=["none", "two"])
async def test_a_request_has_one_host(hosts: bytes) -> None:
    """D16."""
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"GET / HTTP/1.1\r\n" + hosts + b"\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 400 ")
        assert not app.scopes
        writer.close()


@pytest.mark.parametrize(
    "codings",
    [b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"],
    ids=["one line", "two lines"],
)
async def test_a_transfer_coding_is_not_taken_for_none(codings: bytes) -> None:
    """D16: the compressed body was read as if it were plain."""
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + codings + b"\r\n1\r\na\r\n0\r\n\r\n")
        assert await typed(reader) == (400, "bad_request")
        assert not app.scopes
        writer.close()


async def test_websockets_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """D7: it was a 500 with a traceback in the log."""
    caplog.set_level(logging.WARNING)
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n")
        head = (await rest(reader)).lower()
        assert head.startswith(b"http/1.1 426 ")
        assert b"\r\nupgrade: http/1.1\r\n" in head
        assert not app.scopes
        writer.close()
    assert not caplog.records


@pytest.mark.parametrize("protocol", [b"h2c", b"WebSocket"])
@pytest.mark.parametrize("size", [2, 2 * MAX_HEAD_BYTES])
async def test_other_upgrades_are_ignored(protocol: bytes, size: int) -> None:
    """F1: Java's client offers h2c with every request. Its body was lost, or taken for the next request."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        % protocol
    )
    head = b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (offer, size)
    body = (GET * size)[:size]
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        for count, is_split in enumerate([False, True] * 2):
            writer.write(head if is_split else head + body)
            await until(lambda count=count: len(app.gates) > count)
            if is_split:
                writer.write(body)
            await until(lambda count=count: len(app.bodies) > count)
            assert app.bodies[count] == body
            app.gates[count].set()
            async with asyncio.timeout(WAIT_S):
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        assert len(app.scopes) == 4
        assert not [name for scope in app.scopes for name, _ in scope["headers"] if name == b"upgrade"]
        writer.close()


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("keeps", [b"", b"Connection: keep-alive\r\n", b"Host: x\r\n"])
async def test_http_1_0_gets_no_chunks(has_length: bool, method: bytes, keeps: bytes) -> None:
    """F12: the end of the connection ends the response (RFC 9112 §6.1)."""
    async with served() as app:
        app.has_length, app.answer = has_length, b"streamed"
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(method + b" / HTTP/1.0\r\nExpect: 100-continue\r\n" + keeps + b"\r\n")
        await until(lambda: app.gates)
        app.gates[0].set()
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close" in head
        assert b"transfer-encoding" not in head
        assert (b"content-length" in head) is has_length
        assert body == (b"streamed" if method == b"GET" else b"")
        writer.close()


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
async def test_other_versions_are_refused(version: bytes) -> None:
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"GET / HTTP/%b\r\nHost: x\r\n\r\n" % version)
        assert await typed(reader) == (505, "bad_request")
        assert not app.scopes
        writer.close()


def post(size: int, *, whole: bool = True) -> bytes:
    """A request with a body, or without the last byte of it."""
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (size + (not whole)) + b"a" * size


async def typed(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and code of an error that ends its connection."""
    head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def test_partial_bodies_are_bounded_together() -> None:
    """D12: a hundred of them took 333 MB, and there was no bound. The one that began first is dropped."""
    async with served(bounds=ServerBounds(max_partial_bytes=50_000)) as app:
        clients = [await asyncio.open_connection("127.0.0.1", app.port) for _ in range(3)]
        for index, (_, writer) in enumerate(clients):
            writer.write(post(20_000, whole=False))
            await until(lambda index=index: len(app.gates) == index + 1)
        assert await typed(clients[0][0]) == (503, "too_many_bodies")
        for index in (1, 2):
            reader, writer = clients[index]
            writer.write(b"a")
            app.gates[index].set()
            async with asyncio.timeout(WAIT_S):
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        for _, writer in clients:
            writer.close()


async def test_a_partial_body_gives_way_that_is_alone_too_much() -> None:
    async with served(bounds=ServerBounds(max_partial_bytes=50_000)) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(post(50_001, whole=False))
        assert await typed(reader) == (503, "too_many_bodies")
        writer.close()


async def test_one_turn_of_the_loop_reads_little_however_many_send() -> None:
    """D12: a hundred bodies at once made turns of 25 MB; `/health` waited for several of them."""
    turns = [0]

    class Counted(GuardedConnection):
        """Counts what each turn reads."""

        def data_received(self, data: bytes) -> None:
            if not turns[-1]:
                asyncio.get_running_loop().call_soon(turns.append, 0)
            turns[-1] += len(data)
            super().data_received(data)

    size = 1_000_000
    async with served(connection=Counted) as app:
        clients = [await asyncio.open_connection("127.0.0.1", app.port) for _ in range(40)]
        for _, writer in clients:
            writer.write(b"P")
        await until(lambda: sum(turns) == len(clients))
        turns[:] = [0]
        for _, writer in clients:
            writer.write(post(size)[1:])
        await until(lambda: len(app.gates) == len(clients))
        for gate in app.gates:
            gate.set()
        for reader, writer in clients:
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"ok")
            writer.close()
        assert sum(turns) > len(clients) * size
    assert max(turns[1:]) <= 4 * MAX_TURN_BYTES  # before the first one nobody waits


async def test_every_byte_counts_once_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that comes with its head is parsed in two pieces."""
    counted: list[int] = []
    bounds = ServerBounds()
    async with served(bounds=bounds) as app:
        monkeypatch.setattr(bounds.turns, "note_read", lambda reading, size: counted.append(size))
        _, writer = await asyncio.open_connection("127.0.0.1", app.port)
        await until(lambda: app.server.server_state.connections)
        whole = post(2 * MAX_HEAD_BYTES)
        app.connection.data_received(whole)
        assert counted == [len(whole)]
        writer.close()


async def test_bodies_of_running_requests_are_bounded_together() -> None:
    """A whole one that is too much is dropped itself; partial ones before it."""
    async with served(bounds=ServerBounds(max_body_bytes=100_000)) as app:
        (first, one), (second, two), (third, three) = [
            await asyncio.open_connection("127.0.0.1", app.port) for _ in range(3)
        ]
        one.write(post(60_000))
        await until(lambda: app.gates)
        two.write(post(20_000, whole=False))
        await until(lambda: len(app.gates) == 2)
        three.write(post(30_000))
        assert await typed(second) == (503, "too_many_bodies")
        fourth, four = await asyncio.open_connection("127.0.0.1", app.port)
        four.write(post(20_000))
        assert await typed(fourth) == (503, "too_many_bodies")
        for gate, reader in ((0, first), (2, third)):
            app.gates[gate].set()
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"ok")
        one.write(post(99_000))
        await until(lambda: len(app.gates) == 5)
        app.gates[4].set()
        async with asyncio.timeout(WAIT_S):
            assert (await first.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        for writer in (one, two, three, four):
            writer.close()


async def test_what_clients_do_not_read_is_bounded_together() -> None:
    """The one for which most is buffered is disconnected; the other one may still read."""
    large = 2**24
    async with served(bounds=ServerBounds(max_unread_bytes=2 * large)) as app:
        clients = [await asyncio.open_connection("127.0.0.1", app.port) for _ in range(2)]
        for index, size in enumerate((large, 3 * large)):
            app.answer = bytes(size)
            reader, writer = clients[index]
            writer.write(GET)
            await until(lambda index=index: len(app.gates) == index + 1)
            app.gates[index].set()
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"\r\n\r\n")
        (small, _), (greedy, _) = clients
        assert len(await rest(greedy)) < 3 * large
        async with asyncio.timeout(WAIT_S):
            assert await small.readexactly(large) == bytes(large)
        for _, writer in clients:
            writer.close()


@pytest.mark.parametrize("extra", [0, 1])
async def test_a_body_has_so_many_chunks(extra: int) -> None:
    """Chunks of a byte took the event loop of everybody: each costs two calls."""
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"1\r\na\r\n" * (MAX_CHUNKS - 1 + extra) + b"0\r\n\r\n")
        await until(lambda: app.gates)
        app.gates[0].set()
        received = await rest(reader) if extra else await reader.readuntil(b"ok")
        assert bool(received) is not bool(extra)
        writer.close()


async def test_an_idle_connection_gives_way_to_a_new_one_and_a_busy_one_does_not() -> None:
    async with served(bounds=ServerBounds(max_connections=2)) as app:
        (idle, zero), (busy, one) = [await asyncio.open_connection("127.0.0.1", app.port) for _ in range(2)]
        one.write(GET)
        await until(lambda: app.gates)
        (second, two) = await asyncio.open_connection("127.0.0.1", app.port)
        assert await rest(idle) == b""
        two.write(GET)
        await until(lambda: len(app.gates) == 2)
        (third, three) = await asyncio.open_connection("127.0.0.1", app.port)
        assert await typed(third) == (503, "too_many_connections")
        for gate, reader in zip(app.gates, (busy, second), strict=True):
            gate.set()
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"ok")
        for writer in (zero, one, two, three):
            writer.close()


async def test_only_100_continue_can_be_expected() -> None:
    async with served() as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: 100-Continue\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"a")
        app.gates[0].set()
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"ok")
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: miracles\r\n\r\n")
        assert await typed(reader) == (417, "bad_request")
        writer.close()


GROWING_BODIES = """
import psutil
from kvferry.common.http.server import return_large_buffers
return_large_buffers()
rss = psutil.Process().memory_info
bytearray(2**24)  # freed at once: glibc would keep as much from now on
before = rss().rss
bodies = [bytearray() for _ in range(32)]
for _ in range(32):
    for body in bodies:
        body += bytes(2**16)
full = rss().rss
del body, bodies
print(full - before, rss().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc's malloc")
async def test_large_buffers_go_back_when_they_are_freed() -> None:
    """D12: 128 MiB of bodies that grow side by side took 220, of which nothing went back."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GROWING_BODIES, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    held, kept = map(int, out.split())
    assert held < 80 * 2**20
    assert kept < 16 * 2**20
