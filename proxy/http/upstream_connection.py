# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection to an agent, at the level of its bytes.

This is the minimum cost of relaying, so nothing here awaits or allocates per piece of a response body: pieces
go to a sink within the callback that receives them. One timer serves all deadlines of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from kvferry.common.http.memory_budget import MemoryBudget, largest
from kvferry.common.state_machine import State, transition
from kvferry.proxy.errors import ProxyError, TooManyResponses

Sink = Callable[[bytes], None]
"""Consumes one piece of a body. What it raises closes the connection and is re-raised to the reader."""

MAX_BUFFERED_BYTES = 64 * 1024
"""From this many bytes of an unread body on, reading from the socket pauses."""
MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a response's headers, and of what may come between two pieces of a body: chunk extensions,
trailers. The parser has no limit, and a line costs it the square of its size."""
_HEADER_FRAMING = len(b": \r\n")
MAX_TURN_BYTES = 16 * 1024
"""What one connection may deliver in one turn of the event loop: of what an earlier turn left, and again of
what is read. The other connections come before the rest."""
MEASURED_BYTES = 64 * 1024
"""After how much of a response what is held of it is counted anew."""
STALE_AFTER_S = 1.0
"""A server that closes a connection sooner after its last response does not do so because it is idle."""
MAX_RESPONSE_BYTES_HELD = 1024 * 1024 * 1024
"""Of all responses: bodies that are read as a whole, events without their end, token lines of streams."""
NO_DEADLINE = float("inf")


class HeldResponse(Protocol):
    """A response that is being read (`UpstreamConnection`)."""

    def fail(self, error: ProxyError) -> None:
        """End it, so that what it holds is freed."""


class ResponseBounds(MemoryBudget[HeldResponse]):
    """Beyond the limit the response that holds most is ended.

    So a server that sends much ends its own responses first, and those of others that send little go on.
    """

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES_HELD) -> None:
        super().__init__(max_bytes, largest, _end)


def _end(response: HeldResponse) -> None:
    response.fail(TooManyResponses("the proxy holds as much of servers' responses as it may"))


class ConnectionBroken(Exception):
    """The connection was lost, or the peer violated HTTP, before the response was complete."""


class _BadHead(Exception):
    """Raised in a callback of the parser, to stop it."""


class AgentUnresponsive(ConnectionBroken):
    """The connection was aborted because its agent no longer works."""


class StaleConnection(ConnectionBroken):
    """The peer closed a connection that had been idle for `STALE_AFTER_S`, instead of answering.

    Servers close what is idle for too long (uvicorn, so vLLM, after 5 s), even just when a request comes.
    """


class ConnectionState(State):
    IDLE = "idle"
    HEADERS = "headers"
    """A request was sent; the response's headers have not arrived."""
    BODY = "body"
    COMPLETE = "complete"
    """The response has arrived to its last byte."""
    CLOSED = "closed"


CONNECTION_TRANSITIONS: dict[ConnectionState, frozenset[ConnectionState]] = {
    ConnectionState.IDLE: frozenset({ConnectionState.HEADERS, ConnectionState.CLOSED}),
    ConnectionState.HEADERS: frozenset({ConnectionState.BODY, ConnectionState.CLOSED}),
    ConnectionState.BODY: frozenset({ConnectionState.COMPLETE, ConnectionState.CLOSED}),
    ConnectionState.COMPLETE: frozenset({ConnectionState.IDLE, ConnectionState.CLOSED}),
    ConnectionState.CLOSED: frozenset(),
}


class UpstreamConnection(asyncio.Protocol):
    """Carries one request at a time: `send`, `read_headers`, then `read_some`, or `stream_to`
    and `wait_complete`.

    It may be reused after `reset` if `reusable`. `on_closed` is called once, with this connection. `bounds`:
    shared by all connections of a pool.
    """

    def __init__(
        self, on_closed: Callable[[UpstreamConnection], None], bounds: ResponseBounds | None = None
    ) -> None:
        self.state = ConnectionState.IDLE
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """Of the latest response; names in lower case, the last of each."""
        self._on_closed = on_closed
        self._bounds = bounds or ResponseBounds()
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._sink: Sink | None = None
        self._held = _nothing
        """How many bytes the sink holds of the response."""
        self._unmeasured_bytes = 0
        """Received since it was last asked."""
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._paused = False
        self._wants_reading = True
        self._is_reading = True
        self._turn_began_at = 0.0
        self._turn_bytes = 0
        """Delivered in this turn of the event loop, or in the same tick of its clock."""
        self._postponed: bytes | None = None
        """Read from the socket, for later turns. Nothing is read meanwhile."""
        self._next_turn: asyncio.Handle | None = None
        self._head_bytes = 0
        """Of the headers so far."""
        self._overhead_bytes = 0
        """Received since the request was sent, or since the last piece of the body."""
        self._is_keep_alive = False
        self.idle_since = NO_DEADLINE
        """When the response before had been read, on the loop's clock."""
        self._may_be_stale = False
        """Whether it had been idle for `STALE_AFTER_S` then."""
        self._progress_at = 0.0
        self._deadline = NO_DEADLINE
        self._idle_timeout_s = NO_DEADLINE
        self._timer: asyncio.TimerHandle | None = None

    @property
    def reusable(self) -> bool:
        """Whether the response is complete and the agent keeps the connection open."""
        return self.state is ConnectionState.COMPLETE and self._is_keep_alive and self._postponed is None

    @property
    def waiting_since(self) -> float | None:
        """Since when a response, or more of it, has been awaited without progress; None while it is not."""
        if self.state not in (ConnectionState.HEADERS, ConnectionState.BODY) or self._is_held_up:
            return None
        return self._progress_at

    def send(self, request: bytes, deadline: float, body: bytes = b"") -> None:
        """Send a whole request, head and body; `body` is what of it is not in `request`.

        `deadline` is on the loop's clock and holds until `set_deadline` is called. When it passes, the
        pending wait raises `TimeoutError`.
        """
        self._transition(ConnectionState.HEADERS)
        self._may_be_stale = self._loop.time() - self.idle_since >= STALE_AFTER_S
        self.status, self.headers = 0, {}
        self._head_bytes = self._overhead_bytes = self._unmeasured_bytes = 0
        self._sink = None
        self._transport.write(request)
        if body:
            self._transport.write(body)
        self.set_deadline(deadline)

    async def read_headers(self) -> None:
        """Wait for `status` and `headers`.

        Raises `ConnectionBroken`, which may be `StaleConnection`, or `TimeoutError`.
        """
        while self.state is ConnectionState.HEADERS:
            await self._wait()
        self._raise()

    def stream_to(self, sink: Sink, held: Callable[[], int] | None = None) -> None:
        """Pass the body to `sink`, piece by piece: what is buffered now, the rest as it arrives.

        `held` says how many bytes the sink keeps of it; None for a sink that keeps nothing.
        """
        self._sink, self._held = sink, held or _nothing
        buffer, self._buffer, self._buffered_bytes = self._buffer, [], 0
        for piece in buffer:
            self._deliver(piece)
        self._set_reading(not self._paused)

    async def read_some(self) -> bytes:
        """The body's buffered bytes, or the next to arrive; empty at its end. `stream_to` may follow.

        Raises as `wait_complete` does. The idle timeout runs only while a read is pending.
        """
        self._progress_at = self._loop.time()
        while not self._buffer and self.state is ConnectionState.BODY:
            await self._wait()
        if not self._buffer:
            self._raise()
        data, self._buffer, self._buffered_bytes = b"".join(self._buffer), [], 0
        self._set_reading(True)
        return data

    def take_body(self) -> bytes | None:
        """The whole body, if it is buffered to its end; else None, and nothing is taken."""
        if self.state is not ConnectionState.COMPLETE:
            return None
        buffer, self._buffer, self._buffered_bytes = self._buffer, [], 0
        return buffer[0] if len(buffer) == 1 else b"".join(buffer)

    async def wait_complete(self) -> None:
        """Wait for the body's end. Raises `ConnectionBroken`, `TimeoutError`, or what the sink raised."""
        while self.state is ConnectionState.BODY:
            await self._wait()
        self._raise()

    def set_deadline(self, deadline: float, idle_timeout_s: float = NO_DEADLINE) -> None:
        """Set the deadline of the response, and how long the agent may send nothing within it."""
        self._deadline, self._idle_timeout_s = deadline, idle_timeout_s
        self._progress_at = now = self._loop.time()
        due = min(deadline, now + idle_timeout_s)
        # A timer that fires too early checks and sets the next one: cheaper than one for every request.
        if self._timer is None or self._timer.when() > due:
            self._arm(due)

    def pause(self) -> None:
        """Stop reading, because the client is slow. The idle timeout stops meanwhile."""
        self._paused = True
        self._set_reading(False)

    def resume(self) -> None:
        """Undo `pause`."""
        self._paused = False
        self._progress_at = self._loop.time()
        self._set_reading(True)

    def reset(self) -> None:
        """Make the connection ready for another request. Legal only when the response is complete."""
        self._transition(ConnectionState.IDLE)
        self.idle_since = self._loop.time()
        self._deadline = self._idle_timeout_s = NO_DEADLINE
        self._sink, self._held = None, _nothing
        self._buffer, self._buffered_bytes = [], 0
        self._paused = False
        self._set_reading(True)

    def close(self) -> None:
        """Close at once, which also cancels a response that is still being sent. Idempotent."""
        self._fail(ConnectionBroken("closed by the proxy"))

    def fail(self, error: BaseException) -> None:
        """Close at once: the pending wait raises `error`."""
        self._fail(error)

    def abort(self) -> None:
        """Close at once: the pending wait raises `AgentUnresponsive`."""
        self._fail(AgentUnresponsive("aborted"))

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._postponed is not None:  # a TLS transport may deliver more after it was paused
            self._postponed += data
            return
        now = self._loop.time()
        if now != self._turn_began_at:
            self._turn_began_at, self._turn_bytes = now, 0
        self._progress_at = now
        self._turn_bytes += len(data)
        if self._turn_bytes > MAX_TURN_BYTES:
            data = self._postpone(data)
        self._overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionBroken(f"invalid HTTP/1.1: {error}"))
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self._fail(ConnectionBroken(f"more than {MAX_HEAD_BYTES} bytes without a piece of the body"))
        self._unmeasured_bytes += len(data)
        if self._unmeasured_bytes > MEASURED_BYTES and self._sink is not None:
            self._unmeasured_bytes = 0
            self._bounds.hold(self, self._held())

    def connection_lost(self, error: Exception | None) -> None:
        while self._postponed:  # it was received before
            self._continue(is_last=True)
        if self.state is ConnectionState.BODY and not self._is_framed:
            self._transition(ConnectionState.COMPLETE)
            self._wake()
        is_unanswered = self.state is ConnectionState.HEADERS and not self._overhead_bytes
        kind = StaleConnection if is_unanswered and self._may_be_stale else ConnectionBroken
        self._fail(kind("the connection was lost"))

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.state is not ConnectionState.HEADERS:
            return  # a trailer is no header (RFC 9110 §6.5.1)
        self._head_bytes += len(name) + len(value) + _HEADER_FRAMING
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail(ConnectionBroken(f"its headers exceed {MAX_HEAD_BYTES} bytes"))
            raise _BadHead
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = {}
            return
        if self.state is not ConnectionState.HEADERS:
            self._fail(ConnectionBroken("a response without a request"))
            return
        if status < 100:
            self._fail(ConnectionBroken(f"an invalid status: {status}"))
            return
        self.status = status
        self._is_keep_alive = self._parser.should_keep_alive()  # not available once the message has ended
        self._transition(ConnectionState.BODY)
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        if self.state is not ConnectionState.BODY:
            return
        if self._sink is not None:
            self._deliver(body)
            return
        self._wake()
        self._buffer.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > MAX_BUFFERED_BYTES:
            self._set_reading(False)

    def on_message_complete(self) -> None:
        if self.state is ConnectionState.BODY:
            self._transition(ConnectionState.COMPLETE)
            self._wake()

    @property
    def _is_held_up(self) -> bool:
        """Whether the response makes no progress because the proxy or its client does not read it."""
        return self._paused or (self._sink is None and self._waiter is None)

    @property
    def _is_framed(self) -> bool:
        """Whether the response states its own length; else it ends with the connection."""
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers

    def _deliver(self, piece: bytes) -> None:
        if self._sink is None:
            return  # an earlier call of it has raised
        try:
            self._sink(piece)
        except Exception as error:  # noqa: BLE001 (re-raised by `wait_complete`)
            self._error = error
            self._fail(error)

    def _set_reading(self, wanted: bool) -> None:
        self._wants_reading = wanted
        if self._postponed is not None:
            if wanted and self._next_turn is None:
                self._next_turn = self._loop.call_soon(self._continue)
            wanted = False
        if wanted is not self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    def _postpone(self, data: bytes) -> bytes:
        """Leave for later turns what is too much for this one; returns the rest."""
        room = max(0, MAX_TURN_BYTES - self._turn_bytes + len(data))
        self._postponed = data[room:]
        self._set_reading(self._wants_reading)
        return data[:room]

    def _continue(self, *, is_last: bool = False) -> None:
        """Go on with what was postponed, unless the client is slow: then `_set_reading` calls again."""
        self._next_turn = None
        if self._postponed is None or not (self._wants_reading or is_last):
            return
        data, self._postponed = self._postponed, None
        self._turn_bytes = 0
        self.data_received(data)
        self._set_reading(self._wants_reading)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _arm(self, at: float) -> None:
        self._disarm()
        if at < NO_DEADLINE:
            self._timer = self._loop.call_at(at, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        now = self._loop.time()
        if self._is_held_up:
            self._progress_at = now
        if now >= self._deadline or now - self._progress_at >= self._idle_timeout_s:
            self._fail(TimeoutError())
        else:
            self._arm(min(self._deadline, self._progress_at + self._idle_timeout_s))

    def _fail(self, error: BaseException) -> None:
        if self.state is ConnectionState.CLOSED:
            return
        if self.state is not ConnectionState.COMPLETE:
            self._error = error
        self._transition(ConnectionState.CLOSED)
        self._disarm()
        self._sink, self._held = None, _nothing
        self._postponed = None
        self._transport.abort()
        self._wake()
        self._on_closed(self)

    def _transition(self, state: ConnectionState) -> None:
        self.state = transition("connection to an agent", CONNECTION_TRANSITIONS, self.state, state)


def _nothing() -> int:
    return 0
