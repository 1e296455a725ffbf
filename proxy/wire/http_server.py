# SPDX-License-Identifier: Apache-2.0
"""uvicorn as a part of a process that handles its own signals, and the guard of its connections.

uvicorn's version is pinned: `GuardedConnection` depends on its internals.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers. The parser has no limit; one header costs it the square of its size."""
MAX_PIPELINED = 100
"""Requests that a connection may send ahead of the response to the first of them."""

Header = tuple[bytes, bytes]
CLOSE: Header = (b"connection", b"close")


class BadHead(Exception):
    """Raised in a callback of the parser, to stop it: the connection is closed."""


class _Reading(FlowControl):
    """Does not read while requests are queued: uvicorn resumes for each request that it runs."""

    def __init__(self, transport: asyncio.Transport, queued: deque[Any]) -> None:
        super().__init__(transport)
        self._queued = queued

    def resume_reading(self) -> None:
        if not self._queued:
            super().resume_reading()


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection with bounds on what a client can send before its request is known.

    For use as uvicorn's `http` class, with `ws="none"`.

    Args:
        head_s: Deadline for the head of a request, from the connection's start or from the first byte after
            the last response. uvicorn itself only limits how long a connection may be idle after a response.
    """

    def __init__(self, *args: Any, head_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_s = head_s
        self._head_deadline: asyncio.TimerHandle | None = None
        self._head_room = MAX_HEAD_BYTES
        """Bytes that the pending head (or trailers) may still have; unlimited while a body is received."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Reading(transport, self.pipeline)
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
            self._reject(431, "head_too_large", f"the request's head exceeds {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._head_room = sys.maxsize
        self._cancel_head_deadline()
        if [name for name, _ in self.headers].count(b"host") != 1 and self.parser.get_http_version() == "1.1":
            self._reject(400, "bad_request", "a request must have exactly one Host header")
            raise BadHead
        super().on_headers_complete()
        self.headers = []  # trailers go here, and are no headers of the request
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise BadHead(f"more than {MAX_PIPELINED} requests are pipelined")

    def on_chunk_header(self) -> None:
        self._head_room = MAX_HEAD_BYTES  # after the last one, trailers come

    def on_body(self, body: bytes) -> None:
        self._head_room = sys.maxsize
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_room = MAX_HEAD_BYTES
        # uvicorn stopped reading at 64 KiB, and resumes when the application asks for more. It does not ask
        # after the end of the body, but a disconnect is noticed only while reading.
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.flow.resume_reading()  # uvicorn did before it took the next request from the queue

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_head_deadline()

    def send_400_response(self, msg: str) -> None:
        """Called for what the parser rejects."""
        if not self.transport.is_closing():
            self._reject(400, "bad_request", msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a request for another protocol is served as if it had not asked for one."""

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_deadline(self) -> None:
        """Start the deadline for the next request's head, unless a request is being served."""
        if self._head_deadline is None and not self._is_serving:
            self._head_deadline = self.loop.call_later(self._head_s, self._on_head_deadline)

    def _cancel_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _on_head_deadline(self) -> None:
        if self._head_room < MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject(408, "head_timeout", "the request's head did not arrive in time")
        else:
            self.transport.close()

    def _reject(self, status: int, code: str, message: str) -> None:
        """Answer a malformed request head with an error, and close the connection."""
        if self._is_serving:
            self.transport.abort()  # an error cannot be sent in the middle of another request's response
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        content = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), CLOSE)
        self.transport.write(response_head(status, (*self.server_state.default_headers, *content)) + body)
        self.transport.close()


def response_head(status: int, headers: Iterable[Header]) -> bytes:
    """A response's status line and headers."""
    lines = [STATUS_LINE[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process that owns it decides when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers as they are."""
        yield

    def close_connections(self) -> None:
        """Stop listening, and close every connection once its pending output is sent.

        uvicorn itself would end the requests that are still running with a 500 in plain text.
        """
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.close()
