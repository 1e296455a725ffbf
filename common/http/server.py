# SPDX-License-Identifier: Apache-2.0
"""uvicorn as a part of a process that handles its own signals, and the guard of its connections.

uvicorn's version is pinned: `GuardedConnection` depends on its internals.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvferry.common.http.browser_guard import BrowserGuard
from kvferry.common.http.memory_budget import MemoryBudget, largest, oldest
from kvferry.common.telemetry.recurring_warnings import RecurringWarnings

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers. The parser has no limit; one header costs it the square of its size."""
MAX_PIPELINED = 100
"""Requests that a connection may send ahead of the response to the first of them."""
MAX_CHUNKS = 16384
"""Of one body. Each costs as much as some kilobytes, and nothing else bounds how short they are."""
MAX_CONNECTIONS = 16384
"""Of one process; fewer where it may not open twice as many files."""
MAX_BODY_BYTES_HELD = 1024 * 1024 * 1024
"""Of the bodies of all requests of one process that have no complete response yet."""
MAX_PARTIAL_BYTES_HELD = 128 * 1024 * 1024
"""Of those of them that have not arrived completely."""
MAX_TURN_BYTES = 1024 * 1024
"""Of bodies that are read in one turn of the event loop, from all connections. What else the process serves
waits for the whole turn, and reading costs up to ten times as much as usual where memory is slow to get.
"""
MAX_UNREAD_BYTES_HELD = 512 * 1024 * 1024
"""Of all responses of one process, what was written for clients that do not read."""
CANCEL_TIMEOUT_S = 2.0
ZMQ_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f"
"""What ZMQ sends first."""
HANDSHAKE_S = 0.1
"""For connections that are being established when the server stops."""
COLLECTION_THRESHOLD = 10_000
"""Objects that come and stay until the youngest are looked through for cycles."""
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_BPF = struct.Struct("HBBI")
_DROP_SYN = (  # linux/filter.h; a segment begins with its TCP header
    (0x30, 0, 0, 13),  # load the byte of flags
    (0x45, 0, 1, 0x02),  # SYN?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # accept
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BUFFER_BYTES = 128 * 1024
"""More than one read from a socket takes, for that would cost a system call each."""
_LONG_READ_BYTES = 16 * 1024
"""Shorter ones are not counted: what they cost is their number, whatever they hold."""
_READ_BYTES = 256 * 1024
"""The most that uvloop and asyncio read from a connection before others have their turn."""
_CANDIDATES = 64
"""How many connections are looked at to find one that is idle."""

Header = tuple[bytes, bytes]
CLOSE: Header = (b"connection", b"close")
_MORE_HEADERS: dict[int, tuple[Header, ...]] = {
    426: ((b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")),  # RFC 9110 §15.5.22
    503: ((b"retry-after", b"1"),),
}
"""Of a response with this status that is an error of the guard's."""

ErrorBody = Callable[[bytes, int, str, str], bytes]
"""Makes the body of an error of the guard's, of the request's target (empty before it is known), the status,
the code and the message.
"""

logger = logging.getLogger(__name__)


def openai_error(target: bytes, status: int, code: str, message: str) -> bytes:
    """Make the body of an error in OpenAI's shape (`ErrorBody`)."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


class RequestRejected(Exception):
    """Raised in a callback of the parser, to stop it: the connection is closed."""


class _Reading(FlowControl):
    """Does not read while requests are queued (uvicorn resumes for each request that it runs), nor while
    others have their turn.
    """

    def __init__(self, transport: asyncio.Transport, queued: deque[Any]) -> None:
        super().__init__(transport)
        self.awaits_turn = False
        self._queued = queued
        self._is_wanted = True
        """Whether uvicorn reads on; it does not while the application has not taken what was read."""

    def pause_reading(self) -> None:
        self._is_wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_wanted = True
        if self.read_paused and not self._queued and not self.awaits_turn:
            super().resume_reading()

    def await_turn(self) -> None:
        """Do not read until `take_turn`."""
        self.awaits_turn = True
        super().pause_reading()

    def take_turn(self) -> None:
        """Read on, if that is wanted and the connection is still open."""
        self.awaits_turn = False
        if self._is_wanted and not self._transport.is_closing():
            self.resume_reading()


class _Turns:
    """Bounds how much one turn of the event loop reads, from all connections of a server.

    Connections that deliver more wait, and read on in the order in which they began to wait, a few in each
    turn: however many send large bodies at once, everything else is served between any few of them. While a
    hundred clients sent 7 MB each to a proxy on 2 busy cores, `/health` took 0.2 to 0.4 s (95th percentile)
    and 8 s at most; without this 1.6 to 2.2 s and 22 s.
    """

    def __init__(self) -> None:
        self._room = MAX_TURN_BYTES
        self._waiting: deque[_Reading] = deque()
        self._is_counting = False
        """Whether the turn that goes on has read anything, so that its end is awaited."""

    def note_read(self, reading: _Reading, size: int) -> None:
        """Count bytes that a connection delivered in this turn; it waits if they were too many."""
        self._room -= size
        if self._room < 0 and not reading.awaits_turn:
            reading.await_turn()
            self._waiting.append(reading)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin the next turn."""
        self._room = MAX_TURN_BYTES
        for _ in range(min(len(self._waiting), MAX_TURN_BYTES // _READ_BYTES)):
            self._waiting.popleft().take_turn()
        self._is_counting = bool(self._waiting)
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin)


class ServerBounds:
    """What all connections of a server may hold together.

    Args:
        max_connections: None for as many as this process may open files for.
        max_body_bytes: Of requests without a complete response.
        max_partial_bytes: Of those of them that have not arrived completely.
        max_unread_bytes: Of responses whose clients do not read.
    """

    def __init__(
        self,
        *,
        max_connections: int | None = None,
        max_body_bytes: int = MAX_BODY_BYTES_HELD,
        max_partial_bytes: int = MAX_PARTIAL_BYTES_HELD,
        max_unread_bytes: int = MAX_UNREAD_BYTES_HELD,
    ) -> None:
        self.max_connections = max_connections_allowed() if max_connections is None else max_connections
        self.partial = MemoryBudget[GuardedConnection](max_partial_bytes, oldest, GuardedConnection.drop_body)
        self.bodies = MemoryBudget[GuardedConnection](
            max_body_bytes, lambda _, last: next(iter(self.partial.held), last), GuardedConnection.drop_body
        )
        """Partial bodies are dropped first, else the one that has just grown."""
        self.unread = MemoryBudget[GuardedConnection](
            max_unread_bytes, largest, GuardedConnection.disconnect_reader
        )
        self.turns = _Turns()
        self.warnings = RecurringWarnings(logger)


def spare_full_collections() -> None:
    """Leave all that exists now out of garbage collections; to be called once everything is set up.

    A full one takes 10 ms and more over what was imported, and all streams stand still meanwhile. Of what
    comes later nearly nothing is in cycles: Python's own thresholds would spend 5 % of the CPU on looking.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTION_THRESHOLD, 10, 10)


def return_large_buffers() -> None:
    """Have malloc return large buffers to the system once they are freed.

    Without this glibc takes the largest buffer that was ever freed for a size worth keeping: bodies then lie
    in its heap, grow there from one gap to the next, and what is freed stays. While a hundred clients sent
    7 MB each, a proxy grew by 153 to 157 MiB, and kept 13 to 125 of them; without this it grew by 244 to 275
    and kept 175 to 212. No-op without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BUFFER_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BUFFER_BYTES)


def raise_file_limit() -> None:
    """Let this process open as many files as it may allow itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections_allowed() -> int:
    """Leave half of the files that this process may open to all else, such as connections to agents."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection with bounds on what a client can send, and make the server hold.

    For use as uvicorn's `http` class, with `ws="none"`.

    Args:
        head_s: Deadline for the head of a request, from the connection's start or from the first byte after
            the last response. uvicorn itself only limits how long a connection may be idle after a response.
        bounds: Shared by all connections of the server.
        last_request_s: When the server stops, how long a connection without a request may still send one: it
            may be on its way. 0 closes such connections at once.
        browser_guard: Refuses what pages of other sites cause; None serves it.
        error_body: Makes the bodies of errors.
    """

    def __init__(
        self,
        *args: Any,
        head_s: float,
        bounds: ServerBounds,
        last_request_s: float = 0.0,
        browser_guard: BrowserGuard | None = None,
        error_body: ErrorBody = openai_error,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._error_body = error_body
        self.url = b""  # uvicorn has none before the first request
        self._browser_guard = browser_guard
        self._head_s = head_s
        self._last_request_s = last_request_s
        self._is_stopping = False
        self._bounds = bounds
        self._head_deadline: asyncio.TimerHandle | None = None
        self._head_room = MAX_HEAD_BYTES
        """Bytes that the pending head (or trailers) may still have; unlimited while a body is received."""
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._num_chunks = 0
        self._body_bytes = 0
        """Of the bodies of its requests that have no complete response yet."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._reading = _Reading(transport, self.pipeline)
        if len(self.connections) > self._bounds.max_connections and not self._replace_idle():
            self._reject(503, "too_many_connections", "the server has as many connections as it may have")
            return
        self._start_head_deadline()

    def data_received(self, data: bytes) -> None:
        if len(data) > _LONG_READ_BYTES:
            self._bounds.turns.note_read(self._reading, len(data))
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Give the parser what was received, no more of a head at a time than it may still have."""
        while True:
            now = data[: self._head_room]
            self._head_room -= len(now)
            try:
                data = data[self._feed(now) :]
            except httptools.HttpParserError:
                if not self.transport.is_closing():
                    self._warn_of_agent(now)
                    self._reject(400, "bad_request", "this is not HTTP")
            if self.transport.is_closing():
                return
            if self._body_bytes and self.cycle.more_body:
                self._bounds.partial.hold(self, self._body_bytes)
            if not data:
                self._start_head_deadline()
                return
            if not self._head_room:
                self._reject(431, "head_too_large", f"the request's head exceeds {MAX_HEAD_BYTES} bytes")
                return

    def _warn_of_agent(self, data: bytes) -> None:
        """Warn if what is not HTTP is an agent that tries to register at this port."""
        if data.startswith(ZMQ_GREETING) and self.client is not None:
            message = "an agent on %s passed this HTTP port to --proxy; it needs the discovery port"
            self._bounds.warnings.warn("not HTTP", self.client[0], message, self.client[0])

    def _feed(self, data: bytes) -> int:
        """Feed the parser; return how many bytes it took. Raises `HttpParserError`.

        It stops behind a head that offers another protocol, as if the next byte were that protocol's. No
        offer is accepted here, so a new one gets the head again, without the offer: the request is served as
        any other (RFC 9110 §7.8), its body and what follows included.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            version = self.parser.get_http_version().encode()
            line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(b"".join((line, *fields, b"\r\n")))
            taken: int = offer.args[0]
            return taken
        return len(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_chunks = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))  # the parser strips in front alone

    def on_headers_complete(self) -> None:
        self._head_room = sys.maxsize
        self._cancel_head_deadline()
        headers = dict(self.headers)
        refusal = _refusal(self.headers, headers, self.parser)
        if refusal is not None:
            status, message = refusal
            self._reject(status, "bad_request", message)
            raise RequestRejected(message)
        if self._browser_guard is not None:
            caused = self._browser_guard.refusal(self.parser.get_method(), self.url, headers)
            if caused is not None:
                self._reject(403, *caused)
                raise RequestRejected(caused[1])
        if self.parser.should_upgrade():
            return  # see `_feed`
        self.expect_100_continue = b"expect" in headers and self.parser.get_http_version() == "1.1"
        super().on_headers_complete()
        if self._is_stopping:
            self.cycle.keep_alive = False
        self.headers = []  # trailers go here, and are no headers of the request
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise RequestRejected(f"more than {MAX_PIPELINED} requests are pipelined")

    def on_chunk_header(self) -> None:
        self._head_room = MAX_HEAD_BYTES  # after the last one, trailers come
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            self.transport.abort()
            raise RequestRejected(f"a body in more than {MAX_CHUNKS} chunks")

    def on_body(self, body: bytes) -> None:
        self._head_room = sys.maxsize
        if self.cycle.response_complete or self.transport.is_closing():
            return
        self._body_bytes += len(body)
        self._bounds.bodies.hold(self, self._body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._head_room = MAX_HEAD_BYTES
        if self in self._bounds.partial.held:
            self._bounds.partial.release(self)
        # uvicorn stopped reading at 64 KiB, and resumes when the application asks for more. It does not ask
        # after the end of the body, but a disconnect is noticed only while reading.
        if self.flow.read_paused:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, app if may_chunk(cycle) else partial(_run_unframed, app, cycle))

    def on_response_complete(self) -> None:
        """As uvicorn's, but with one timer for the connection instead of one for each response."""
        self.server_state.total_requests += 1
        if self._body_bytes and not self.pipeline:
            self._release_bodies()
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._on_idle_timer)
        if self.flow.read_paused:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_head_deadline()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._release_bodies()
        self._bounds.unread.release(self)
        self.pipeline.clear()
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle = None  # type: ignore[assignment]  # they refer to each other

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bounds.unread.hold(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._bounds.unread.release(self)

    def shutdown(self) -> None:
        """Called when the server stops: answer what is being served, and close."""
        self._is_stopping = True
        if self._is_serving or not self._last_request_s:
            super().shutdown()
        else:
            self.loop.call_later(self._last_request_s, self._close_unless_serving)

    def drop_body(self) -> None:
        """Called when too much is held: answer the request that is being received by 503, and close."""
        logger.warning("a request of %s was dropped: too much of requests' bodies is held", self.client)
        self._release_bodies()
        self._end_request(503, "too_many_bodies", "the server holds as much of requests' bodies as it may")

    def disconnect_reader(self) -> None:
        """Called when most of what clients do not read is buffered for this one."""
        logger.warning("%s reads too little of its response, and is disconnected", self.client)
        self.transport.abort()

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        return not self._is_serving and not self.transport.is_closing()

    def _close_unless_serving(self) -> None:
        if self._is_idle:
            self.transport.close()

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

    def _on_idle_timer(self) -> None:
        """Close a connection that has been idle for too long; else look again when it may be."""
        is_idle = not self._is_serving and self._head_deadline is None
        due = (self._idle_since if is_idle else self.loop.time()) + self.timeout_keep_alive
        if due > self.loop.time():
            self._idle_timer = self.loop.call_at(due, self._on_idle_timer)
        else:
            self.transport.close()

    def _release_bodies(self) -> None:
        """Free bodies that are not read any more: connections and requests wait for the garbage collector."""
        if self.cycle is not None:
            self.cycle.body = bytearray()
        for cycle, _ in self.pipeline:
            cycle.body = bytearray()
        self._body_bytes = 0
        self._bounds.bodies.release(self)
        if self in self._bounds.partial.held:
            self._bounds.partial.release(self)

    def _replace_idle(self) -> bool:
        """Close a connection without a request, in favour of this one. False: none was found."""
        for other in islice(self.connections, _CANDIDATES):
            if isinstance(other, GuardedConnection) and other is not self and other._is_idle:
                other.transport.abort()
                return True
        return False

    def _reject(self, status: int, code: str, message: str) -> None:
        """Answer a malformed head or body with an error, and close the connection."""
        if not self._is_serving:
            self._send_error(status, code, message)
        elif self.cycle.more_body:
            self._end_request(status, code, message)
        else:
            self.transport.abort()  # an error cannot be sent in the middle of another request's response

    def _end_request(self, status: int, code: str, message: str) -> None:
        """Answer the request whose body is being received with an error, and close the connection."""
        if self.pipeline or self.cycle.response_started:
            self.transport.abort()
            return
        self.cycle.disconnected = True  # the application's own response would come too late
        self._send_error(status, code, message)

    def _send_error(self, status: int, code: str, message: str) -> None:
        body = self._error_body(self.url, status, code, message)
        content = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), CLOSE)
        more = _MORE_HEADERS.get(status, ())
        head = response_head(status, (*self.server_state.default_headers, *content, *more))
        self.transport.write(head + body)
        self.transport.close()


def _refusal(
    fields: Sequence[Header], headers: dict[bytes, bytes], parser: httptools.HttpRequestParser
) -> tuple[int, str] | None:
    """Return the status and the reason with which a request's head is refused; None if it is not.

    Args:
        fields: All header fields, names in lower case; `headers`: the last of each name.
    """
    version, method = parser.get_http_version(), parser.get_method()
    if version not in ("1.0", "1.1"):
        return 505, "only HTTP/1.1 and HTTP/1.0 are spoken here"
    if method == b"CONNECT":
        return 400, "there are no tunnels here"
    if len(headers) < len(fields) or b"host" not in headers:
        hosts = sum(name == b"host" for name, _ in fields)
        if hosts > 1 or (not hosts and version == "1.1"):
            return 400, "a request must have exactly one Host header"
    if b"transfer-encoding" in headers:
        codings = [value.strip().lower() for name, value in fields if name == b"transfer-encoding"]
        if codings != [b"chunked"]:  # RFC 9112 §6.1; the parser would take any before it for none
            return 400, "no transfer coding but chunked is understood"
    if version == "1.1" and headers.get(b"expect", b"100-continue").lower() != b"100-continue":
        return 417, "only 100-continue can be expected"
    # Any other offer is ignored, and h2c must be: some clients offer it with every request.
    is_handshake = parser.should_upgrade() and method == b"GET" and version == "1.1"
    if is_handshake and b"websocket" in headers[b"upgrade"].lower():
        return 426, "there are no WebSockets here"
    return None


def may_chunk(cycle: RequestResponseCycle) -> bool:
    """Whether the client understands chunks. HTTP/1.0 does not (RFC 9112 §6.1)."""
    return cycle.scope["http_version"] == "1.1"


async def _run_unframed(app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any) -> None:
    """Run an ASGI application; a response whose length it does not give ends with the connection.

    uvicorn would send that in chunks. It closes the connection after every response to HTTP/1.0.
    """
    has_length = True

    async def send_unframed(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # else uvicorn takes it for excess
        await send(message)

    await app(scope, receive, send_unframed)


def response_head(status: int, headers: Iterable[Header]) -> bytes:
    """A response's status line and headers."""
    lines = [STATUS_LINE[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def _ignore_new_connections(listener: socket.socket) -> None:
    """Have the system drop what opens a connection to a listening socket (Linux; elsewhere no-op).

    The client repeats it after a second, when it is refused or another process listens there. Without this,
    what is half established when the socket is closed is reset, perhaps behind a request: at 3 of 10 stops
    with clients 20 ms away, 35 requests were lost that way, and none at 10 stops with it.
    """
    program = ctypes.create_string_buffer(b"".join(_BPF.pack(*each) for each in _DROP_SYN))
    with suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
        )


def _accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that wait to be accepted, and close the socket right after the last one.

    Of 64 clients that connected all the time, 60 lost a request at each stop without this.
    """
    with listener:
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                continue  # that one has gone already
            connection.setblocking(False)
            yield connection


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process that owns it decides when to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers as they are."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and end when all connections have, or at the graceful timeout.

        Connections that the system has established, but uvicorn has not accepted, are served like the
        others: closing the listening socket would reset them, in the midst of their first request. Before it
        is closed no new ones are established, so a client is either served or refused.
        """
        for each in sockets or ():
            _ignore_new_connections(each)
        await asyncio.sleep(HANDSHAKE_S)
        queued = [each.dup() for each in sockets or ()]
        for each in queued:
            each.setblocking(False)  # what is dup'd shares the mode, and asyncio needs this one
        for server in self.servers:
            server.close()
        established = [connection for each in queued for connection in _accept_all(each)]
        await asyncio.gather(*map(self._serve_connection, established))
        await super().shutdown(sockets)

    async def _serve_connection(self, connection: socket.socket) -> None:
        config = self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        with suppress(OSError):  # as for any client that has gone, or whose handshake fails
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection, ssl=config.ssl)

    async def cancel_requests(self) -> None:
        """Cancel every running request, as if its client had disconnected, and wait until they have ended.

        uvicorn abandons those that are left at its graceful timeout.
        """
        tasks = tuple(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)

    def close_connections(self) -> None:
        """Stop listening, and close every connection once its pending output is sent.

        uvicorn itself would end the requests that are still running with a 500 in plain text.
        """
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.close()
