# SPDX-License-Identifier: Apache-2.0
"""One client's connection: uvicorn's, with a way for a request's answer to be written without an await.

The only place that knows uvicorn's insides (its version is pinned): `ClientReply` marks on uvicorn's cycle
what `send` would have marked. Everything else on the connection is uvicorn's own: parsing, keep-alive,
pipelining, TLS, the end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvferry.proxy.errors import HeadTooLarge, HeadTooSlow, ProxyError

EXTENSION = "kvferry.reply"
"""The ASGI extension of a request's scope whose `reply` is its `ClientReply`."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers. The parser has no bound; one header costs it the square of its size."""

Header = tuple[bytes, bytes]
CLOSE: Header = (b"connection", b"close")


def _nobody(_: bool) -> None:
    """For `ClientReply.paused` while there is nobody to tell."""


def _unmoved() -> None:
    """For `ClientReply.lost` while nobody would mind."""


class ClientReply:
    """The answer to one request: whole by `whole`, or streamed by `begin`, `write`… and `end`.

    `lost` is called when the client goes away before the end; `paused(True)` when it does not take what was
    written, and `paused(False)` when it does again. What is written meanwhile is kept in memory.
    """

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport
        self.lost: Callable[[], object] = _unmoved
        self.paused: Callable[[bool], None] = _nobody

    @property
    def begun(self) -> bool:
        """Whether the client may have seen anything of the answer."""
        return self._cycle.response_started

    @property
    def is_lost(self) -> bool:
        """Whether the client has gone away."""
        return self._cycle.disconnected

    @property
    def body(self) -> bytes | None:
        """The request's body, if it is all here."""
        return None if self._cycle.more_body else bytes(self._cycle.body)

    def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Give the whole answer."""
        length = (b"content-length", b"%d" % len(body))
        head = self._head(status, (length, *headers))
        self._transport.write(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    def begin(self, status: int, headers: Iterable[Header]) -> None:
        """Begin a streamed answer."""
        self._cycle.chunked_encoding = True
        self._transport.write(self._head(status, ((b"transfer-encoding", b"chunked"), *headers)))

    def write(self, piece: bytes) -> None:
        """Give a piece of a streamed answer; not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        """End a streamed answer."""
        self._transport.write(b"0\r\n\r\n")
        self._complete()

    def give_up(self) -> None:
        """Break the connection off. Nothing else would tell the client that this is not the end."""
        self._cycle.disconnected = True
        self._transport.abort()

    def _head(self, status: int, headers: Iterable[Header]) -> bytes:
        cycle = self._cycle
        assert not cycle.response_started, "answered twice"
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        last = () if cycle.keep_alive else (CLOSE,)
        return _head(status, (*self._connection.server_state.default_headers, *headers, *last))

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()


class ClientConnection(HttpToolsProtocol):
    """uvicorn's connection, for use as its `http` class.

    Args:
        head_s: Deadline for the head of a request, from the connection's begin or from what came first after
            the last answer. uvicorn has one for a client that says nothing after an answer, and no other.
        stall_s: A client that takes nothing for so long, while as much waits for it as the transport holds
            (64 KiB), is cut off.
    """

    def __init__(self, *args: Any, head_s: float, stall_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_s = head_s
        self._head_due: asyncio.TimerHandle | None = None
        self._head_room = MAX_HEAD_BYTES
        """What the head (or trailers) that is coming may still have; no bound while a body is coming."""
        self._stall_s = stall_s
        self._stalled: asyncio.TimerHandle | None = None
        self._reply: ClientReply | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        now, later = data[: self._head_room], data[self._head_room :]
        self._head_room -= len(now)
        super().data_received(now)
        if self.transport.is_closing():
            return
        if not later:
            self._await_head()
        elif self._head_room:
            self.data_received(later)
        else:
            self._refuse(HeadTooLarge(f"the request's head exceeds {MAX_HEAD_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        self._head_room = sys.maxsize
        self._await_no_head()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._head_room = MAX_HEAD_BYTES  # after the last one, trailers come

    def on_body(self, body: bytes) -> None:
        self._head_room = sys.maxsize
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._reply = ClientReply(self, cycle)
        cycle.scope["extensions"] = {EXTENSION: {"reply": self._reply}}
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_room = MAX_HEAD_BYTES
        # uvicorn stopped at 64 KiB, and takes it up with an application that asks for more. Nobody asks after
        # the end of the body; but only who reads sees the client leave.
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._reply = None
        super().on_response_complete()

    def eof_received(self) -> None:
        # The event loop closes the connection now, but first waits for a client that may never read again.
        if self._reply is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._take_notice()
        self._await_no_head()
        if (reply := self._reply) is not None:
            self._reply = None
            reply._cycle.disconnected = True  # of a pipelined request, uvicorn marks the last one only
            reply.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._stall_s, self.transport.abort)
        if self._reply is not None:
            self._reply.paused(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_notice()
        if self._reply is not None:
            self._reply.paused(False)

    def _take_notice(self) -> None:
        """The client takes what it is given, or is gone."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _await_head(self) -> None:
        """Unless a request is being served, the next one's head is due."""
        if self._reply is None and self._head_due is None:
            self._head_due = self.loop.call_later(self._head_s, self._head_is_late)

    def _await_no_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        if self._head_room < MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadTooSlow("the request's head did not arrive in time"))
        else:
            self.transport.close()

    def _refuse(self, error: ProxyError) -> None:
        """Close the connection because of a head that is not whole."""
        if self._reply is not None:
            self.transport.abort()  # no refusal fits into another request's answer
            return
        body = error.body()
        content = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), CLOSE)
        self.transport.write(_head(error.status, (*self.server_state.default_headers, *content)) + body)
        self.transport.close()


def _head(status: int, headers: Iterable[Header]) -> bytes:
    lines = [STATUS_LINE[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
