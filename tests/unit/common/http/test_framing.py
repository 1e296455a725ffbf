# SPDX-License-Identifier: Apache-2.0
"""Where requests begin and end on a connection: the application sees what h11 reads from the same bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from kvferry.common.http.server import GuardedConnection, ServerBounds

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
TARGETS = {"OPTIONS": "*", "CONNECT": "/first"}
OFFERS = {
    "no offer": b"",
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    "websocket": b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "unknown, two lines, any case": b"cOnNeCtIoN: keep-alive, uPgRaDe\r\nUPGRADE: a/1\r\nupgrade: b, c\r\n",
    "and close": b"Connection: close, Upgrade\r\nUpgrade: x\r\n",
    "not in Connection": b"Upgrade: h2c\r\n",
    "no protocol": b"Connection: upgrade\r\n",
}
INNER = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
"""As a body: nobody may take it for a request."""
FRAMINGS = {
    "no body": (b"", b""),
    "empty": (b"Content-Length: 0\r\n", b""),
    "length": (b"Content-Length: %d\r\n" % len(INNER), INNER),
    "length, 100-continue": (b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(INNER), INNER),
    "chunks": (
        b"Transfer-Encoding: chunked\r\n",
        b"5;a=b\r\n%b\r\n%X\r\n%b\r\n0;end\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
        % (INNER[:5], len(INNER) - 5, INNER[5:]),
    ),
    "both": (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
    "two lengths": (b"Content-Length: 3\r\nContent-Length: 4\r\n", b"abcd"),
}
NEXT = b"POST /next HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
REFUSALS = (400, 426)

Seen = tuple[str, str, bytes]
"""Method, target and body."""


@dataclass(slots=True)
class Socket(asyncio.Transport):
    """A client that reads everything."""

    written: bytes = b""
    is_closed: bool = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    @property
    def statuses(self) -> list[int]:
        """Of the responses; none of them has a body with such a line."""
        return [int(each.split()[0]) for each in self.written.split(b"HTTP/1.1 ")[1:]]


@dataclass(slots=True)
class Recorder:
    """An application that reads every request to its end, and responds to it."""

    seen: list[Seen] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, message = b"", await receive()
        while message["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
            message = await receive()
        else:
            return
        assert (b"upgrade", b"x") not in scope["headers"]
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        self.seen.append((scope["method"], target.decode(), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def read(pieces: list[bytes], app: Any = None) -> tuple[list[Seen], list[int], bool]:
    """Feed a connection; return what the application saw, the statuses, and whether it was closed."""
    app = app or Recorder()
    config = uvicorn.Config(cast(Any, app), ws="none", lifespan="off", log_config=None)
    connection = GuardedConnection(
        config=config, server_state=ServerState(), app_state={}, head_s=60.0, bounds=ServerBounds()
    )
    socket = Socket()
    connection.connection_made(socket)
    for piece in pieces:
        if not socket.is_closed:
            connection.data_received(piece)
            await idle(connection)
    closed = socket.is_closed
    connection.connection_lost(None)
    await idle(connection)
    return getattr(app, "seen", []), [status for status in socket.statuses if status != 100], closed


async def idle(connection: GuardedConnection) -> None:
    """Let the application go on until it waits for more."""
    for _ in range(4 + 3 * len(connection.pipeline)):
        await asyncio.sleep(0)


def by_h11(data: bytes) -> tuple[list[Seen], bool]:
    """What h11 reads, and whether it goes on after that."""
    peer, seen, request, body = h11.Connection(h11.SERVER), [], None, b""
    peer.receive_data(data)
    while True:
        try:
            event = peer.next_event()
        except h11.RemoteProtocolError:
            return seen, False
        match event:
            case h11.Request():
                request, body = event, b""
            case h11.Data():
                body += bytes(event.data)
            case h11.EndOfMessage():
                assert request is not None
                seen.append((request.method.decode(), request.target.decode(), body))
                status = 405 if request.method == b"CONNECT" else 200
                peer.send(h11.Response(status_code=status, headers=[("content-length", "0")]))
                peer.send(h11.EndOfMessage())
                if peer.our_state is not h11.DONE or peer.their_state is not h11.DONE:
                    return seen, False
                peer.start_next_cycle()
            case _:
                return seen, True


def may_be_refused(method: str, offer: str, framing: str) -> bool:
    """A request that every server may refuse: it is not served in any other way then."""
    is_handshake = (method, offer) == ("GET", "websocket")
    return method == "CONNECT" or is_handshake or framing in ("both", "two lengths")


async def check(pieces: list[bytes], expected: tuple[list[Seen], bool], may_refuse: bool) -> None:
    """What h11 sees, or a refusal and then nothing."""
    requests, goes_on = expected
    seen, statuses, closed = await read(pieces)
    if may_refuse and statuses[-1] != 200:
        assert statuses[-1] in REFUSALS
        assert closed
        assert seen == requests[: len(statuses) - 1]
    else:
        assert seen == requests
        assert set(statuses) == {200}
        assert closed is not goes_on


def head(method: str, fields: bytes, version: str = "1.1") -> bytes:
    line = f"{method} {TARGETS.get(method, '/first?a=b')} HTTP/{version}\r\nHost: x\r\n"
    return line.encode() + fields + b"\r\n"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offer", OFFERS)
async def test_every_method_and_framing(method: str, offer: str) -> None:
    """F1."""
    for framing, (fields, body) in FRAMINGS.items():
        may_refuse = may_be_refused(method, offer, framing)
        for data in (
            head(method, OFFERS[offer] + fields) + body,
            head(method, fields + OFFERS[offer]) + body,
        ):
            for times in (1, 2):
                whole = data * times + NEXT
                expected = by_h11(whole)
                end = data.index(b"\r\n\r\n") + 4
                bytewise = [whole[at : at + 1] for at in range(len(whole))]
                for pieces in ([whole], [whole[:end], whole[end:]], bytewise):
                    await check(pieces, expected, may_refuse)


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_every_split(offer: str, framing: str) -> None:
    """F1."""
    fields, body = FRAMINGS[framing]
    whole = head("POST", OFFERS[offer] + fields) + body + NEXT
    expected = by_h11(whole)
    for at in range(1, len(whole)):
        await check([whole[:at], whole[at:]], expected, may_be_refused("POST", offer, framing))


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize(
    "body",
    [b"zz\r\n", b"-1\r\nabc", b"3\r\nabcd\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nX : 1\r\n\r\n"],
)
async def test_a_broken_body_is_a_400(offer: str, body: bytes) -> None:
    """The connection was closed without a word."""
    first = head("POST", OFFERS[offer] + b"Transfer-Encoding: chunked\r\n")
    for pieces in ([first + body], [first, body], [first, *(body[at : at + 1] for at in range(len(body)))]):
        assert await read(pieces) == ([], [400], True)
        assert (await read([NEXT, *pieces]))[1] == [200, 400]


async def test_space_around_a_value_is_none_of_it() -> None:
    """RFC 9112 §5: it is optional on both sides. A `Host` with it was no name of the server."""
    fields = b"Expect: \t100-continue \t \r\nX-Own:  a b \t\r\nContent-Length: 3 \r\nX-Empty: \r\n"
    found: dict[bytes, bytes] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.update(scope["headers"])
        await Recorder()(scope, receive, send)

    _, statuses, _ = await read([head("POST", fields) + b"abc"], app)
    assert statuses == [200]
    assert found == {
        b"host": b"x",
        b"expect": b"100-continue",
        b"x-own": b"a b",
        b"content-length": b"3",
        b"x-empty": b"",
    }


@pytest.mark.parametrize("offer", OFFERS)
async def test_http_1_0_has_one_request_a_connection(offer: str) -> None:
    """F1."""
    for framing in ("no body", "length"):
        fields, body = FRAMINGS[framing]
        whole = head("POST", OFFERS[offer] + fields, "1.0") + body + NEXT
        expected = by_h11(whole)
        assert len(expected[0]) == 1
        for pieces in ([whole], [whole[at : at + 1] for at in range(len(whole))]):
            await check(pieces, expected, may_refuse=False)
