# SPDX-License-Identifier: Apache-2.0
"""A client's connection: uvicorn's, extended so that a response can be written without an await.

The only module that depends on uvicorn's internals (its version is pinned): `ClientResponse` updates
uvicorn's request cycle as ASGI's `send` would have. Everything else on the connection is uvicorn's own:
parsing, keep-alive, pipelining, TLS, shutdown.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvferry.proxy.errors import HeadTooLarge, HeadTooSlow, ProxyError

EXTENSION = "kvferry.response"
"""The ASGI extension of a request's scope whose `response` is its `ClientResponse`."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers. The parser has no limit; one header costs it the square of its size."""

Header = tuple[bytes, bytes]
CLOSE: Header = (b"connection", b"close")


class AlreadyResponded(RuntimeError):
    """A second response was started for one request: an internal error."""


def _ignore_pause(_: bool) -> None: ...


def _ignore_disconnect() -> None: ...


class ClientResponse:
    """The response to one request: either `send`, or streamed by `start`, `write`… and `end`.

    `on_disconnect` is called when the client disconnects before the end; `on_pause(True)` when it does not
    read what was written, and `on_pause(False)` when it does again. What is written meanwhile is buffered.
    """

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport
        self.on_disconnect: Callable[[], object] = _ignore_disconnect
        self.on_pause: Callable[[bool], None] = _ignore_pause

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""
        return self._cycle.disconnected

    @property
    def request_body(self) -> bytes | None:
        """The request's body, if it has arrived completely."""
        return None if self._cycle.more_body else bytes(self._cycle.body)

    def send(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send a complete response."""
        length = (b"content-length", b"%d" % len(body))
        head = self._head(status, (length, *headers))
        self._transport.write(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    def start(self, status: int, headers: Iterable[Header]) -> None:
        """Start a streamed response."""
        self._cycle.chunked_encoding = True
        self._transport.write(self._head(status, ((b"transfer-encoding", b"chunked"), *headers)))

    def write(self, piece: bytes) -> None:
        """Write a piece of a streamed response; not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        """End a streamed response."""
        self._transport.write(b"0\r\n\r\n")
        self._complete()

    def abort(self) -> None:
        """Abort the connection: the only way to show the client that a started response is incomplete."""
        self._cycle.disconnected = True
        self._transport.abort()

    def _head(self, status: int, headers: Iterable[Header]) -> bytes:
        cycle = self._cycle
        if cycle.response_started:
            raise AlreadyResponded
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
        head_s: Deadline for the head of a request, from the connection's start or from the first byte after
            the last response. uvicorn itself only limits how long a connection may be idle after a response.
        stall_s: How long a client may read nothing, while the transport's buffer (64 KiB) is full, before it
        is
            disconnected.
    """

    def __init__(self, *args: Any, head_s: float, stall_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_s = head_s
        self._head_deadline: asyncio.TimerHandle | None = None
        self._head_room = MAX_HEAD_BYTES
        """Bytes that the pending head (or trailers) may still have; unlimited while a body is received."""
        self._stall_s = stall_s
        self._stall_deadline: asyncio.TimerHandle | None = None
        self._response: ClientResponse | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_deadline()

    def data_received(self, data: bytes) -> None:
        now, later = data[: self._head_room], data[self._head_room :]
        self._head_room -= len(now)
        super().data_received(now)
        if self.transport.is_closing():
            return
        if not later:
            self._start_head_deadline()
        elif self._head_room:
            self.data_received(later)
        else:
            self._reject(HeadTooLarge(f"the request's head exceeds {MAX_HEAD_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        self._head_room = sys.maxsize
        self._cancel_head_deadline()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._head_room = MAX_HEAD_BYTES  # after the last one, trailers come

    def on_body(self, body: bytes) -> None:
        self._head_room = sys.maxsize
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._response = ClientResponse(self, cycle)
        cycle.scope["extensions"] = {EXTENSION: {"response": self._response}}
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_room = MAX_HEAD_BYTES
        # uvicorn stopped reading at 64 KiB, and resumes when the application asks for more. It does not ask
        # after the end of the body, but a disconnect is noticed only while reading.
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._response = None
        super().on_response_complete()

    def eof_received(self) -> None:
        # The event loop closes the connection now, but first flushes to a client that may never read again.
        if self._response is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_stall()
        self._cancel_head_deadline()
        if (response := self._response) is not None:
            self._response = None
            response._cycle.disconnected = True  # of pipelined requests, uvicorn marks the last one only
            response.on_disconnect()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_deadline is None:
            self._stall_deadline = self.loop.call_later(self._stall_s, self.transport.abort)
        if self._response is not None:
            self._response.on_pause(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall()
        if self._response is not None:
            self._response.on_pause(False)

    def _cancel_stall(self) -> None:
        if self._stall_deadline is not None:
            self._stall_deadline.cancel()
            self._stall_deadline = None

    def _start_head_deadline(self) -> None:
        """Start the deadline for the next request's head, unless a request is being served."""
        if self._response is None and self._head_deadline is None:
            self._head_deadline = self.loop.call_later(self._head_s, self._on_head_deadline)

    def _cancel_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _on_head_deadline(self) -> None:
        if self._head_room < MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject(HeadTooSlow("the request's head did not arrive in time"))
        else:
            self.transport.close()

    def _reject(self, error: ProxyError) -> None:
        """Answer a malformed request head with an error, and close the connection."""
        if self._response is not None:
            self.transport.abort()  # an error cannot be sent in the middle of another request's response
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
