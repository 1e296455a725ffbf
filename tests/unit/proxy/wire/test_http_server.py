# SPDX-License-Identifier: Apache-2.0
"""The guard of a server's connections, with an application that reads as Quart does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import uvicorn

from kvferry.proxy.wire.http_server import MAX_HEAD_BYTES, MAX_PIPELINED, GuardedConnection, HttpServer

WAIT_S = 5.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(slots=True)
class Held:
    """Responds to a request when its gate opens; asks for more of its body meanwhile."""

    port: int = 0
    gates: list[asyncio.Event] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)
    server: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gate = asyncio.Event()
        self.scopes.append(scope)
        self.gates.append(gate)
        while (await receive()).get("more_body"):
            pass
        asking = asyncio.ensure_future(receive())
        await gate.wait()
        asking.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    @property
    def connection(self) -> GuardedConnection:
        (connection,) = self.server.server_state.connections
        return cast(GuardedConnection, connection)


@asynccontextmanager
async def served(head_s: float = WAIT_S) -> AsyncIterator[Held]:
    app = Held()
    app.server = HttpServer(
        uvicorn.Config(
            app,
            http=cast(Any, partial(GuardedConnection, head_s=head_s)),
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


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


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
