# SPDX-License-Identifier: Apache-2.0
"""What every attempt shares: how its legs are opened and read, and where the client's response goes.

A *leg* is one of the two HTTP requests of an attempt; the *last* leg is the one whose response is the
client's. A leg has three deadlines: for its first byte, for a pause within its body (`UpstreamPool`), and the
request's own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar

from kvferry.common.exceptions import leaves
from kvferry.proxy import sse
from kvferry.proxy.clock import now
from kvferry.proxy.dialects.base import LegRequest
from kvferry.proxy.errors import (
    AgentLost,
    AgentRejected,
    AgentTimeout,
    BadResponse,
    KvUnproven,
    ProxyError,
    TooManyResponses,
)
from kvferry.proxy.fleet.router import Pair
from kvferry.proxy.http.pool import MAX_BODY_BYTES, UpstreamPool, UpstreamRequest, UpstreamResponse
from kvferry.proxy.http.response_bounds import ResponseBounds
from kvferry.proxy.telemetry.request_trace import CANCELLED, RequestTrace
from kvferry.proxy.wire.registration import Incarnation, Register

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Span

T = TypeVar("T")

AgentFailure = AgentLost | AgentTimeout | BadResponse
AGENT_FAILURES = (AgentLost, AgentTimeout, BadResponse)
"""What counts as its agent's failure when a leg ends with it."""


class LegReports(Protocol):
    """Where the end of a leg is reported, exactly once, but for one that its agent rejected."""

    def leg_succeeded(self, agent: Incarnation, /) -> None: ...
    def leg_failed(self, agent: Incarnation, error: AgentFailure, /) -> None: ...
    def leg_cancelled(self, agent: Incarnation, /) -> None:
        """The leg was ended here, while its agent may have been at work on it."""


class PausableSource(Protocol):
    """Where a stream comes from, as far as back-pressure goes."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class ResponseSink(Protocol):
    """Where an attempt puts the client's response: as a whole, or as events. Nothing here waits."""

    def set_whole(self, content_type: str, body: bytes) -> None:
        """Set the response of a request that does not stream; it is sent once the exchange has ended."""

    def write(self, events: bytes) -> None:
        """Send one or more whole events."""

    def write_event(self, event: bytes) -> None:
        """`write` for the one event of a token."""

    def throttling(self, source: PausableSource) -> AbstractContextManager[None]:
        """While open, pause `source` whenever the client reads too slowly."""


class ReservedPair(Protocol):
    """The pair of an attempt, with its slots (`Reservation`)."""

    pair: Pair

    def prefill_over(self) -> None: ...
    def release(self) -> None: ...


class Attempt(ABC):
    """One try of a request with one pair of agents. Call `run` once, then `end` once."""

    def __init__(self, reservation: ReservedPair) -> None:
        self._reservation = reservation

    @property
    def pair(self) -> Pair:
        return self._reservation.pair

    @abstractmethod
    async def run(self, sink: ResponseSink) -> None:
        """Give `sink` the response, `[DONE]` included. Raises `ProxyError`; on `AgentLost` another attempt
        may follow.
        """

    def end(self) -> None:
        """Release what the attempt holds. Does not await, so that a cancelled task completes it too."""
        self._reservation.release()


class Legs:
    """Opens the legs of one request within its deadlines.

    Args:
        deadline: The request's, on the event loop's clock.
        can_retry: Whether the request may be retried now: then the leg of a hanging agent is aborted
            (`proxy.http.hang_detector`).
        trace: Where traces are on; each leg has a span of it.
    """

    def __init__(
        self,
        upstream: UpstreamPool,
        reports: LegReports,
        *,
        first_byte_timeout_s: float,
        deadline: float,
        can_retry: Callable[[], bool],
        trace: RequestTrace | None = None,
    ) -> None:
        self.upstream = upstream
        self.deadline = deadline
        self._trace = trace
        self._reports = reports
        self._first_byte_timeout_s = first_byte_timeout_s
        self._can_retry = can_retry

    def open_prefill(self, server: Register, leg: LegRequest) -> OpenLeg:
        """Open a prefill leg. Its body is short and comes at once: the last byte is due as the first is."""
        due = self._first_byte_deadline(1)
        return self._open("prefill", server, leg, due, due)

    def open_last(
        self,
        server: Register,
        leg: LegRequest,
        *,
        stream: bool,
        patience: int = 1,
        accept_deadline: float = float("inf"),
    ) -> OpenLeg:
        """Open a last leg: a stream, or a body that comes all at once at the very end.

        Args:
            patience: How many times the usual wait a stream may take to begin.
            accept_deadline: When a stream must have begun in any case.
        """
        due = min(self._first_byte_deadline(patience), accept_deadline) if stream else self.deadline
        return self._open("last", server, leg, due, self.deadline)

    def _open(
        self,
        which: Literal["prefill", "last"],
        server: Register,
        leg: LegRequest,
        headers_deadline: float,
        deadline: float,
    ) -> OpenLeg:
        headers, on_end = leg.headers, None
        if self._trace is not None:
            about = {
                "kvferry.agent": server.address,
                "kvferry.incarnation": server.incarnation,
                "kvferry.dialect": server.dialect,
            }
            span = self._trace.begin_leg(which, about)
            headers, on_end = {**headers, **span.headers()}, partial(_end_span, self._trace, span)
        request = self.upstream.post(
            server,
            leg.path,
            leg.body,
            headers,
            headers_deadline=headers_deadline,
            deadline=deadline,
            can_retry=self._can_retry,
        )
        return OpenLeg(request, self._reports, server.incarnation, on_end)

    def _first_byte_deadline(self, patience: int) -> float:
        return min(now() + patience * self._first_byte_timeout_s, self.deadline)


class OpenLeg:
    """A leg; entering sends it and waits for the response's headers, and its end is reported.

    What is raised within counts as the leg's end. KV that cannot be proven says nothing about the agent. A
    class, since a generator's context would cost as much as the request itself.
    """

    def __init__(
        self,
        request: UpstreamRequest,
        reports: LegReports,
        agent: Incarnation,
        on_end: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self._request = request
        self._reports = reports
        self._agent = agent
        self._on_end = on_end

    async def __aenter__(self) -> UpstreamResponse:
        try:
            return await self._request.__aenter__()
        except BaseException as error:
            self._report(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._request.__aexit__(kind, error, trace)
        self._report(error)

    def _report(self, error: BaseException | None) -> None:
        if self._on_end is not None:
            self._on_end(error)
        if error is None:
            self._reports.leg_succeeded(self._agent)
        elif isinstance(error, AGENT_FAILURES) and not isinstance(error, KvUnproven):
            self._reports.leg_failed(self._agent, error)
        elif isinstance(error, asyncio.CancelledError):
            self._reports.leg_cancelled(self._agent)


def _end_span(trace: RequestTrace, span: Span, error: BaseException | None) -> None:
    """End a leg's span. Messages of errors stay out of it: they may quote an agent, and that the request."""
    if isinstance(error, ProxyError):
        trace.end_leg(span, error.code, is_loss=isinstance(error, AgentLost))
    elif isinstance(error, asyncio.CancelledError):
        trace.end_leg(span, CANCELLED)
    else:
        trace.end_leg(span, None if error is None else type(error).__name__)


class EventReader(Protocol):
    """What is done with a stream on its way to the client."""

    @property
    def done(self) -> bool:
        """Whether `[DONE]` has been passed on."""

    def feed(self, piece: bytes) -> None:
        """Read the next bytes; those after `[DONE]` are dropped."""

    def num_held(self) -> int:
        """Bytes that are kept of the stream."""


async def read_events(
    response: UpstreamResponse, agent: Register, reader: EventReader, sink: ResponseSink
) -> None:
    """Feed a last leg's stream to `reader` as it arrives, at the client's pace, up to `[DONE]`.

    Raises what `reader` does, and `AgentLost` for a stream that ends before `[DONE]`. What happens to the
    connection after that is of no consequence.
    """
    try:
        with sink.throttling(response):
            await response.stream_to(reader.feed, reader.num_held)
    except (AgentLost, AgentTimeout):
        if not reader.done:
            raise
    if not reader.done:
        raise lost(agent, "ended its stream without [DONE]")


def require_stream(response: UpstreamResponse, agent: Register) -> None:
    """Raise `BadResponse` unless the response is a stream of events."""
    if not response.content_type.startswith(sse.CONTENT_TYPE):
        raise BadResponse(f"{agent.address} answered {response.content_type} where a stream was asked for")


def require_json(response: UpstreamResponse, agent: Register) -> None:
    """Raise `BadResponse` unless the response is JSON.

    Nothing that a browser would run may be served from where the operator's page is.
    """
    if not response.content_type.startswith("application/json"):
        raise BadResponse(f"{agent.address} answered {response.content_type} where JSON was asked for")


def lost(agent: Register, message: str) -> AgentLost:
    """An `AgentLost` whose message begins with the agent's address."""
    return AgentLost(f"{agent.address} {message}", agent.incarnation)


class RequestPart(Protocol):
    """A part of a request with a response of its own."""

    def forget(self) -> None:
        """Forget the response."""


class KeptResponses:
    """Counts what is kept of the responses to parts of one request, until they are one (`HeldResponse`).

    Args:
        bounds: Of all responses of the proxy. Beyond it, if this holds most, the parts forget theirs, and the
            tasks that are joined, or are to be joined next, end.
    """

    def __init__(self, bounds: ResponseBounds, parts: Sequence[RequestPart]) -> None:
        self._bounds = bounds
        self._parts = parts
        self._size = 0
        self._tasks: Sequence[asyncio.Future[Any]] = ()
        self._error: ProxyError | None = None

    def add(self, size: int) -> None:
        """Count a response. Raises `TooManyResponses` once they are too large, for one or for the proxy."""
        self._size += size
        if self._size > MAX_BODY_BYTES:
            raise TooManyResponses(f"the responses to all parts of the request exceed {MAX_BODY_BYTES} bytes")
        self._bounds.hold(self, self._size)
        if self._error is not None:
            raise self._error

    async def join(self, tasks: Sequence[asyncio.Future[T]]) -> list[T]:
        """`join`; also raises what this was ended with."""
        self._tasks = tasks
        try:
            if self._error is not None:
                self.fail(self._error)
            return await join(tasks)
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._tasks = ()

    def fail(self, error: ProxyError) -> None:
        """See `HeldResponse`."""
        self._error = error
        for part in self._parts:
            part.forget()
        for task in self._tasks:
            task.cancel()

    def release(self) -> None:
        """Count all as gone. Idempotent."""
        if self._size:
            self._size = 0
            self._bounds.release(self)


async def join(tasks: Sequence[asyncio.Future[T]]) -> list[T]:
    """Wait for all and return their results, in order. When one fails, or the caller is cancelled, the others
    are cancelled; all have ended when this returns.

    Raises a `BaseExceptionGroup` of the failures, or CancelledError if the caller was cancelled, whatever
    failed. (`asyncio.TaskGroup` loses a cancellation that comes while it cancels the others.)
    """
    cancelled: asyncio.CancelledError | None = None
    is_ending = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            cancelled = error
        pending = [task for task in tasks if not task.done()]
        if pending and not is_ending:
            is_ending = True
            for task in pending:
                task.cancel()
    ended = [None if task.cancelled() else task.exception() for task in tasks]
    failures = [each for each in ended if each is not None]
    if cancelled is not None:
        raise cancelled
    if failures:
        raise BaseExceptionGroup("of several legs", failures)
    return [task.result() for task in tasks]


def raise_one(failures: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the one failure that the client gets: an agent's rejection of the request, else the first.

    An internal error is raised as it is, in its group.
    """
    ours, others = failures.split(ProxyError)
    if others is not None or ours is None:
        raise failures
    rejections = ours.subgroup(AgentRejected)
    raise next(leaves(rejections or ours)) from None
