# SPDX-License-Identifier: Apache-2.0
"""How legs are opened and read, and where the client's response goes.

A *leg* is one of the two HTTP requests of a sub-request; the *decode* leg is the one whose response is the
client's, and the only one where one server serves alone. A leg has three deadlines: for its first byte, for a
pause within its body (`UpstreamPool`), and the request's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import LegRequest
from kvferry.proxy.errors import (
    AgentBusy,
    AgentLost,
    AgentTimeout,
    BadResponse,
    BusyResponse,
    KvUnproven,
    ProxyError,
    shorten,
)
from kvferry.proxy.http.pool import UpstreamPool, UpstreamRequest, now
from kvferry.proxy.telemetry.request_trace import CANCELLED, RequestTrace
from kvferry.proxy.wire.registration import Incarnation, Register

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Span

T = TypeVar("T")

AgentFailure = AgentLost | AgentTimeout | BadResponse
AGENT_FAILURES = (AgentLost, AgentTimeout, BadResponse)
"""What counts as its agent's failure when a leg ends with it."""
NO_FAULTS = (KvUnproven, AgentBusy, BusyResponse)
"""Failures that say nothing about the agent's health."""


class LegFailures(Protocol):
    """What takes the legs that end otherwise than they should, unless their agents rejected them."""

    def leg_failed(self, agent: Incarnation, error: AgentFailure, /) -> None: ...
    def leg_cancelled(self, agent: Incarnation, /) -> None:
        """The leg was ended here, while its agent may have been at work on it."""


class PausableSource(Protocol):
    """Where a stream comes from, as far as back-pressure goes."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class ResponseSink(sse.EventWriter, Protocol):
    """Where an attempt puts the client's response: as a whole, or as events. Nothing here waits."""

    def set_whole(self, content_type: str, body: bytes) -> None:
        """Set the response of a request that does not stream; it is sent once the exchange has ended."""

    def throttling(self, source: PausableSource) -> AbstractContextManager[None]:
        """While open, pause `source` whenever the client reads too slowly."""


class Legs:
    """Opens the legs of one request within its deadlines. What is raised within a leg counts as its end.

    Args:
        leg_succeeded: Called with the agent of each leg that ends as it should.
        failures: Takes the others.
        deadline: The request's, on the event loop's clock.
        can_retry: Whether the request may be retried now: then the leg of a hanging agent is aborted
            (`proxy.http.hang_detector`).
        trace: Where traces are on; each leg has a span of it.
    """

    def __init__(
        self,
        upstream: UpstreamPool,
        leg_succeeded: Callable[[Incarnation], None],
        failures: LegFailures,
        *,
        first_byte_timeout_s: float,
        deadline: float,
        can_retry: Callable[[], bool],
        trace: RequestTrace | None = None,
    ) -> None:
        self.upstream = upstream
        self.deadline = deadline
        self._trace = trace
        self._leg_succeeded = leg_succeeded
        self._failures = failures
        self._first_byte_timeout_s = first_byte_timeout_s
        self._can_retry = can_retry

    def open_prefill(self, server: Register, leg: LegRequest) -> UpstreamRequest:
        """Open a prefill leg. Its body is short and comes at once: the last byte is due as the first is."""
        due = min(now() + self._first_byte_timeout_s, self.deadline)
        return self._open("prefill", server, leg, due, due)

    def open_decode(
        self,
        server: Register,
        leg: LegRequest,
        *,
        stream: bool,
        patience: int = 1,
        accept_deadline: float = float("inf"),
    ) -> UpstreamRequest:
        """Open a decode leg: a stream, or a body that comes all at once at the very end.

        Args:
            patience: How many times the usual wait a stream may take to begin.
            accept_deadline: When a stream must have begun in any case.
        """
        due = self.deadline
        if stream:
            due = min(now() + patience * self._first_byte_timeout_s, due, accept_deadline)
        return self._open("decode", server, leg, due, self.deadline)

    def _open(
        self,
        which: Literal["prefill", "decode"],
        server: Register,
        leg: LegRequest,
        headers_deadline: float,
        deadline: float,
    ) -> UpstreamRequest:
        headers, on_end = leg.headers, self._ended
        if self._trace is not None:
            about = {
                "kvferry.agent": server.address,
                "kvferry.incarnation": server.incarnation,
                "kvferry.dialect": server.dialect,
            }
            span = self._trace.begin_leg(which, about)
            headers, on_end = {**headers, **span.headers()}, partial(self._ended, span=span)
        return self.upstream.post(
            server,
            leg.path,
            leg.body,
            headers,
            headers_deadline=headers_deadline,
            deadline=deadline,
            can_retry=self._can_retry,
            on_end=on_end,
        )

    def _ended(self, server: Register, error: BaseException | None, span: Span | None = None) -> None:
        if self._trace is not None and span is not None:
            _end_span(self._trace, span, error)
        if error is None:
            self._leg_succeeded(server.incarnation)
        elif isinstance(error, AGENT_FAILURES) and not isinstance(error, NO_FAULTS):
            self._failures.leg_failed(server.incarnation, error)
        elif isinstance(error, asyncio.CancelledError):
            self._failures.leg_cancelled(server.incarnation)


def _end_span(trace: RequestTrace, span: Span, error: BaseException | None) -> None:
    """End a leg's span. Messages of errors stay out of it: they may quote an agent, and that the request."""
    if isinstance(error, ProxyError):
        trace.end_leg(span, error.code, is_loss=isinstance(error, AgentLost))
    elif isinstance(error, asyncio.CancelledError):
        trace.end_leg(span, CANCELLED)
    else:
        trace.end_leg(span, None if error is None else type(error).__name__)


async def read_events(
    response: UpstreamRequest, agent: Register, reader: sse.EventReader, sink: ResponseSink
) -> None:
    """Feed a decode leg's stream to `reader` as it arrives, at the client's pace, up to `[DONE]`.

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


def require_stream(response: UpstreamRequest, agent: Register) -> None:
    """Raise `BadResponse` unless the response is a stream of events."""
    if not response.content_type.startswith(sse.CONTENT_TYPE):
        raise BadResponse(f"{agent.address} answered {_media_type(response)} where a stream was asked for")


def require_json(response: UpstreamRequest, agent: Register) -> None:
    """Raise `BadResponse` unless the response is JSON.

    Nothing that a browser would run may be served from where the operator's page is.
    """
    if not response.content_type.startswith("application/json"):
        raise BadResponse(f"{agent.address} answered {_media_type(response)} where JSON was asked for")


def _media_type(response: UpstreamRequest) -> str:
    return shorten(response.content_type)


def lost(agent: Register, message: str) -> AgentLost:
    """An `AgentLost` whose message begins with the agent's address."""
    return AgentLost(f"{agent.address} {message}", agent.incarnation)
