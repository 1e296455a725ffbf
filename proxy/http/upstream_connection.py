# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection to an agent, at the level of its bytes.

This is the floor of what relaying costs, so that nothing here waits or allocates for a piece of an answer:
pieces go to a sink within the callback that brings them. One timer serves all deadlines of a request.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import cast

import httptools

Sink = Callable[[bytes], None]
"""Takes one piece of a body. What it raises ends the connection, and is what the waiter gets."""

HELD_BYTES = 64 * 1024
"""Of a body that nobody takes yet; then reading pauses."""
FOREVER = float("inf")


class ConnectionBroken(Exception):
    """The connection ended, or spoke no HTTP, before the answer was whole."""


class AgentSilent(ConnectionBroken):
    """The connection was given up, since its agent works no more."""


class State(enum.Enum):
    IDLE = "idle"
    HEAD = "head"
    """A request was sent; the answer's head has not come."""
    BODY = "body"
    WHOLE = "whole"
    """The answer is here to its last byte."""
    CLOSED = "closed"


_NEXT: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.HEAD, State.CLOSED}),
    State.HEAD: frozenset({State.BODY, State.CLOSED}),
    State.BODY: frozenset({State.WHOLE, State.CLOSED}),
    State.WHOLE: frozenset({State.IDLE, State.CLOSED}),
    State.CLOSED: frozenset(),
}


class UpstreamConnection(asyncio.Protocol):
    """Carries one request at a time: `send`, `head`, `feed` and `end` (or `take`); then `reusable` tells.

    `closed` is called once, with this connection, when it is of no more use to anybody.
    """

    def __init__(self, closed: Callable[[UpstreamConnection], None]) -> None:
        self.state = State.IDLE
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """Of the latest answer; names in lower case, the last of each."""
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._sink: Sink | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._is_reading = True
        self._is_kept = False
        self._heard_at = 0.0
        self._by = FOREVER
        self._idle_s = FOREVER
        self._timer: asyncio.TimerHandle | None = None

    @property
    def reusable(self) -> bool:
        """Whether the answer has ended and the agent keeps the connection open."""
        return self.state is State.WHOLE and self._is_kept

    @property
    def quiet_since(self) -> float | None:
        """Since when an answer, or more of it, is waited for in vain; None while nobody waits."""
        if self.state not in (State.HEAD, State.BODY) or self._is_untaken:
            return None
        return self._heard_at

    def send(self, request: bytes, by: float) -> None:
        """Send a whole request, head and body.

        `by` is the deadline, on the loop's clock, until `limit` sets another. When it passes, whoever waits
        gets a `TimeoutError`.
        """
        self._to(State.HEAD)
        self.status, self.headers = 0, {}
        self._sink = None
        self._transport.write(request)
        self.limit(by)

    async def head(self) -> None:
        """Wait for `status` and `headers`. Raises `ConnectionBroken` or `TimeoutError`."""
        while self.state is State.HEAD:
            await self._news()
        self._raise()

    def feed(self, sink: Sink) -> None:
        """Give the body to `sink`, piece by piece: what is here now, and the rest as it comes."""
        self._sink = sink
        held, self._held, self._held_bytes = self._held, [], 0
        for piece in held:
            self._give(piece)
        self._read(not self._paused)

    async def take(self) -> bytes:
        """What has come of the body, or the next to come; nothing at its end. Instead of `feed`.

        Raises as `end` does. The agent's silence counts only while somebody waits here.
        """
        self._heard_at = self._loop.time()
        while not self._held and self.state is State.BODY:
            await self._news()
        if not self._held:
            self._raise()
        held, self._held, self._held_bytes = b"".join(self._held), [], 0
        self._read(True)
        return held

    async def end(self) -> None:
        """Wait for the body's end. Raises `ConnectionBroken`, `TimeoutError`, or what the sink raised."""
        while self.state is State.BODY:
            await self._news()
        self._raise()

    def limit(self, by: float, idle_s: float = FOREVER) -> None:
        """Set the deadline of what is under way, and how long the agent may be silent in it."""
        self._by, self._idle_s = by, idle_s
        self._heard_at = now = self._loop.time()
        due = min(by, now + idle_s)
        # A timer that goes off too early looks, and sets the next: cheaper than one for every request.
        if self._timer is None or self._timer.when() > due:
            self._arm(due)

    def pause(self) -> None:
        """Read no more: whoever takes the pieces is slow. The agent's silence does not count meanwhile."""
        self._paused = True
        self._read(False)

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        self._heard_at = self._loop.time()
        self._read(True)

    def rest(self) -> None:
        """The request is over, and another may be sent."""
        self._to(State.IDLE)
        self._by = self._idle_s = FOREVER
        self._sink = None
        self._held, self._held_bytes = [], 0
        self._paused = False
        self._read(True)

    def close(self) -> None:
        """Close at once; an agent that still answers learns that nobody waits any more. Idempotent."""
        self._fail(ConnectionBroken("closed here"))

    def give_up(self) -> None:
        """The agent works no more: whoever waits for it gets `AgentSilent`."""
        self._fail(AgentSilent("given up"))

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionBroken(f"no HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self.state is State.BODY and not self._is_framed:
            self._to(State.WHOLE)
            self._wake()
        self._fail(ConnectionBroken("the connection ended"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}
            return
        if self.state is not State.HEAD:
            self._fail(ConnectionBroken("an answer to nothing"))
            return
        self.status = status
        self._is_kept = self._parser.should_keep_alive()  # the parser forgets it with the message's end
        self._to(State.BODY)
        self._wake()

    def on_body(self, body: bytes) -> None:
        if self.state is not State.BODY:
            return
        if self._sink is not None:
            self._give(body)
            return
        self._wake()
        self._held.append(body)
        self._held_bytes += len(body)
        if self._held_bytes > HELD_BYTES:
            self._read(False)

    def on_message_complete(self) -> None:
        if self.state is State.BODY:
            self._to(State.WHOLE)
            self._wake()

    @property
    def _is_untaken(self) -> bool:
        """Whether it is for the client that the answer does not go on."""
        return self._paused or (self._sink is None and self._waiter is None)

    @property
    def _is_framed(self) -> bool:
        """Whether the answer says itself where it ends; else its end is the connection's."""
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers

    def _give(self, piece: bytes) -> None:
        if self._sink is None:
            return  # it has raised
        try:
            self._sink(piece)
        except Exception as error:  # noqa: BLE001 (it is raised again, in `end`)
            self._error = error
            self._fail(error)

    def _read(self, wanted: bool) -> None:
        if wanted is not self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    async def _news(self) -> None:
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
        if at < FOREVER:
            self._timer = self._loop.call_at(at, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._is_untaken:
            self._heard_at = now
        if now >= self._by or now - self._heard_at >= self._idle_s:
            self._fail(TimeoutError())
        else:
            self._arm(min(self._by, self._heard_at + self._idle_s))

    def _fail(self, error: BaseException) -> None:
        if self.state is State.CLOSED:
            return
        if self.state is not State.WHOLE:
            self._error = error
        self._to(State.CLOSED)
        self._disarm()
        self._sink = None
        self._transport.abort()
        self._wake()
        self._closed(self)

    def _to(self, state: State) -> None:
        assert state in _NEXT[self.state], f"connection to an agent: {self.state} → {state}"
        self.state = state
