# SPDX-License-Identifier: Apache-2.0
"""A client's connection: uvicorn's, extended so that a response can be written without an await.

Depends on uvicorn's internals (its version is pinned), as its base class does: `ClientResponse` updates
uvicorn's request cycle as ASGI's `send` would have. Everything else on the connection is uvicorn's own:
parsing, keep-alive, TLS, shutdown.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvferry.common.http.server import CLOSE, GuardedConnection, Header, may_chunk, response_head
from kvferry.proxy.http.cors import CorsPolicy

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Handler = Callable[[Scope, Receive, "ClientResponse"], Coroutine[Any, Any, None]]
"""Serves one request, whose scope and `receive` are those of ASGI. It is cancelled when the client leaves."""


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
        self._is_chunked = may_chunk(cycle)
        self.on_disconnect: Callable[[], object] = _ignore_disconnect
        self.on_pause: Callable[[bool], None] = _ignore_pause
        self.was_dropped = False
        """Whether the server answered instead, since it held too much of requests' bodies."""

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""
        return self._cycle.disconnected

    def take_request_body(self) -> bytes | None:
        """Return the request's body, if it has arrived completely; it is not kept here."""
        if self._cycle.more_body:
            return None
        body, self._cycle.body = bytes(self._cycle.body), bytearray()
        return body

    def send(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send a complete response."""
        length = (b"content-length", b"%d" % len(body))
        head = self._head(status, (length, *headers))
        self._transport.write(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    def start(self, status: int, headers: Iterable[Header]) -> None:
        """Start a streamed response."""
        framing = ((b"transfer-encoding", b"chunked"),) if self._is_chunked else ()
        self._transport.write(self._head(status, (*framing, *headers)))

    def write(self, piece: bytes) -> None:
        """Write a piece of a streamed response; not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)

    def end(self) -> None:
        """End a streamed response."""
        if self._is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self._complete()

    def abort(self) -> None:
        """Abort the connection: the only way to show the client that a started response is incomplete."""
        self._cycle.disconnected = True
        self._transport.abort()
        self.forget()

    def forget(self) -> None:
        """Call nothing any more: what is called refers to this response, and would wait for the garbage
        collector with all that it holds of a request.
        """
        self.on_disconnect, self.on_pause = _ignore_disconnect, _ignore_pause

    def _head(self, status: int, headers: Iterable[Header]) -> bytes:
        cycle = self._cycle
        if cycle.response_started:
            raise AlreadyResponded
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        last = () if cycle.keep_alive else (CLOSE,)
        return response_head(status, (*cycle.default_headers, *headers, *last))

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()
        self.forget()


def _limit_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Have the system end a connection when nothing of what waits for the client moves for so long."""
    connection = transport.get_extra_info("socket")
    if connection is not None and sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


class ClientConnection(GuardedConnection):
    """A guarded connection whose client must read, and of which some paths are served without ASGI.

    Args:
        handlers: By path; all other paths are the ASGI application's.
        stall_s: How long a client may read nothing, while the transport's buffer (64 KiB) is full, before it
            is disconnected.
        unread_s: By path, how long what was sent may stay unread, also what is in the system's buffers: these
            hold megabytes (Linux; elsewhere only `stall_s` holds).
        cors: What pages of other origins may do, if anything.
    """

    def __init__(
        self,
        *args: Any,
        handlers: Mapping[str, Handler],
        stall_s: float,
        unread_s: Mapping[str, float] = MappingProxyType({}),
        cors: CorsPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._cors = cors
        self._handlers = handlers
        self._stall_s = stall_s
        self._unread_s = unread_s
        self._stall_deadline: asyncio.TimerHandle | None = None
        self._response: ClientResponse | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._response = response = ClientResponse(self, cycle)
        if self._cors is not None and self._apply_cors(self._cors, cycle, response):
            return
        if (unread_s := self._unread_s.get(cycle.scope["path"])) is not None:
            _limit_unread(self.transport, unread_s)
        handler = self._handlers.get(cycle.scope["path"])
        if handler is None:
            super()._start_asgi_task(cycle, app)
            return
        task = self.loop.create_task(handler(cycle.scope, cycle.receive, response))
        response.on_disconnect = task.cancel
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _apply_cors(self, cors: CorsPolicy, cycle: RequestResponseCycle, response: ClientResponse) -> bool:
        """Add to the response what another origin may. Returns whether a preflight was answered here."""
        path, headers = cycle.scope["path"], dict(cycle.scope["headers"])
        cycle.default_headers = [*cycle.default_headers, *cors.headers(path, headers)]
        allowed = cors.preflight(path, headers) if cycle.scope["method"] == "OPTIONS" else None
        if allowed is None:
            return False
        response.send(200, allowed, b"")
        return True

    def on_response_complete(self) -> None:
        self._response = None
        super().on_response_complete()

    def drop_body(self) -> None:
        if self._response is not None:
            self._response.was_dropped = True
        super().drop_body()

    def eof_received(self) -> None:
        # The event loop closes the connection now, but first flushes to a client that may never read again.
        if self._response is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_stall()
        if (response := self._response) is not None:
            self._response = None
            response._cycle.disconnected = True  # of pipelined requests, uvicorn marks the last one only
            response.on_disconnect()
            response.forget()

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
