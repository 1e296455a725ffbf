# SPDX-License-Identifier: Apache-2.0
"""A client's connection: uvicorn's, extended so that a response can be written without an await.

Each event of a stream is written by one call, which ASGI's `send` would cost several times. Depends on
uvicorn's internals (its version is pinned), as its base class does: `ConnectionResponse` updates uvicorn's
request cycle as `send` would have. Everything else on the connection is uvicorn's own: parsing, keep-alive,
TLS, shutdown.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvferry.common.http.server import CLOSE, GuardedConnection, Header, may_chunk, response_head

Scope = Any
Message = Any
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[["ClientResponse"], Coroutine[Any, Any, None]]
"""Serves one request. It is cancelled when the client disconnects."""
EXTENSION = "kvferry.connection"
"""The extension of an ASGI scope by which the application finds the request's `ClientConnection`."""


class AlreadyResponded(RuntimeError):
    """A second response was started for one request: an internal error."""


def _ignore_pause(_: bool) -> None: ...


def _ignore_disconnect() -> None: ...


class ClientResponse(ABC):
    """The response to one request: either `send`, or streamed by `start`, `write`… and `end`.

    `on_disconnect` is called when the client disconnects before the end; `on_pause(True)` when it does not
    read what was written, and `on_pause(False)` when it does again. What is written meanwhile is buffered.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.headers: Iterable[Header] = ()
        """Sent with whatever is the response."""
        self.on_disconnect: Callable[[], object] = _ignore_disconnect
        self.on_pause: Callable[[bool], None] = _ignore_pause
        self.is_disconnected = False
        """Whether the client has disconnected."""
        self.was_dropped = False
        """Whether the server answered instead, since it held too much of requests' bodies."""

    @abstractmethod
    def serve(self, handler: Handler) -> Awaitable[None]:
        """Run a handler, which must send the response, in this task. To be awaited at once."""

    @abstractmethod
    def send(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send a complete response."""

    @abstractmethod
    def start(self, status: int, headers: Iterable[Header]) -> None:
        """Start a streamed response."""

    @abstractmethod
    def write(self, piece: bytes) -> None:
        """Write a piece of a streamed response; not empty."""

    @abstractmethod
    def end(self) -> None:
        """End a streamed response."""

    @abstractmethod
    def abort(self) -> None:
        """Abort the connection: the only way to show the client that a started response is incomplete."""

    def take_body(self) -> bytes | None:
        """Return the request's body, if it has arrived completely; it is not kept here."""
        return None

    async def read_body(self, limit: int) -> bytes:
        """Receive the request's body; reading stops once it exceeds `limit`."""
        body, more = bytearray(), True  # one buffer: freed pieces would leave gaps in the heap
        while more and len(body) <= limit:
            message = await self._receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body)

    def forget(self) -> None:
        """Call nothing any more: what is called refers to this response, and would wait for the garbage
        collector with all that it holds of a request.
        """
        self.on_disconnect, self.on_pause = _ignore_disconnect, _ignore_pause


class ConnectionResponse(ClientResponse):
    """Writes to the transport of a `ClientConnection`."""

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        super().__init__(cycle.receive)
        self._cycle = cycle
        self._transport = connection.transport
        self._is_chunked = may_chunk(cycle)

    def serve(self, handler: Handler) -> Awaitable[None]:
        task = asyncio.current_task()
        if self.is_disconnected or task is None:
            return asyncio.sleep(0)
        self.on_disconnect = task.cancel
        return handler(self)  # as it is: a coroutine around it would be one more for each of its waits

    def take_body(self) -> bytes | None:
        if self._cycle.more_body:
            return None
        body, self._cycle.body = bytes(self._cycle.body), bytearray()
        return body

    def send(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        length = (b"content-length", b"%d" % len(body))
        head = self._head(status, (length, *headers))
        self._transport.write(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    def start(self, status: int, headers: Iterable[Header]) -> None:
        framing = ((b"transfer-encoding", b"chunked"),) if self._is_chunked else ()
        self._transport.write(self._head(status, (*framing, *headers)))

    def write(self, piece: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)

    def end(self) -> None:
        if self._is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self._complete()

    def abort(self) -> None:
        self.disconnected()
        self._transport.abort()
        self.forget()

    def disconnected(self) -> None:
        """Note that the client has, also for uvicorn: of pipelined requests it marks the last one only."""
        self.is_disconnected = self._cycle.disconnected = True

    def _head(self, status: int, headers: Iterable[Header]) -> bytes:
        cycle = self._cycle
        if cycle.response_started:
            raise AlreadyResponded
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        last = () if cycle.keep_alive else (CLOSE,)
        return response_head(status, (*cycle.default_headers, *self.headers, *headers, *last))

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()
        self.forget()


class ClientConnection(GuardedConnection):
    """A guarded connection whose client must read, and whose responses may be written without ASGI's `send`.

    Args:
        stall_s: How long a client may read nothing, while the transport's buffer (64 KiB) is full, before it
            is disconnected.
    """

    def __init__(self, *args: Any, stall_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_s = stall_s
        self._stall_deadline: asyncio.TimerHandle | None = None
        self.response: ConnectionResponse | None = None
        """To the request that is being served."""

    def limit_unread(self, seconds: float) -> None:
        """Have the system end the connection when nothing of what waits for the client moves for so long.

        Also what is in the system's buffers, which hold megabytes (Linux; elsewhere only `stall_s` holds).
        """
        connection = self.transport.get_extra_info("socket")
        if connection is not None and sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.response = ConnectionResponse(self, cycle)
        cast(Any, cycle.scope)["extensions"] = {EXTENSION: self}
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.response = None
        super().on_response_complete()

    def drop_body(self) -> None:
        if self.response is not None:
            self.response.was_dropped = True
        super().drop_body()

    def eof_received(self) -> None:
        # The event loop closes the connection now, but first flushes to a client that may never read again.
        if self.response is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_stall()
        if (response := self.response) is not None:
            self.response = None
            response.disconnected()
            response.on_disconnect()
            response.forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_deadline is None:
            self._stall_deadline = self.loop.call_later(self._stall_s, self.transport.abort)
        if self.response is not None:
            self.response.on_pause(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall()
        if self.response is not None:
            self.response.on_pause(False)

    def _cancel_stall(self) -> None:
        if self._stall_deadline is not None:
            self._stall_deadline.cancel()
            self._stall_deadline = None
