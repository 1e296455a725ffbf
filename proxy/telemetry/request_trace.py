# SPDX-License-Identifier: Apache-2.0
"""The spans of one request at the proxy: the request, and in it each try's route, queue and legs.

Only where traces are on (`common.telemetry.tracing`). A leg's span is the parent of its agent's. The spans of
another try link to the leg whose loss made it necessary, and say whether it is a retry or a migration.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Attributes, Span

CANCELLED = "cancelled"


class RequestTrace:
    """The spans of one request; `span` is its own, begun at `arrived_at`. Ended by `end`."""

    def __init__(self, span: Span, arrived_at: float) -> None:
        self._span = span
        self._attempt = 1
        self._is_alone = False
        self._links: list[tuple[Span, Attributes]] = []
        self._last_leg: Span | None = None
        self._lost_leg: Span | None = None
        self._open_legs: set[Span] = set()
        self._route: Span | None = self._begin("route", arrived_at)

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return self._span.trace_id

    def describe(self, attributes: Attributes) -> None:
        """Record what is known of the request by now."""
        self._span.set_attributes(attributes)

    def queued(self, since: float) -> None:
        """Record that the request has waited for a pair since then."""
        if self._route is not None:
            self._route.child("queue", since).end(time.monotonic())

    def routed(self, prefill: str, decode: str, transfer_id: str) -> None:
        """A pair was found; without a transfer one agent serves both legs."""
        self._is_alone = not transfer_id
        if self._route is not None:
            agents = {"kvferry.decode": decode}
            if transfer_id:
                agents |= {"kvferry.prefill": prefill, "kvferry.transfer_id": transfer_id}
            self._route.set_attributes(agents)
            self._end_route()

    def route_again(self, why: Literal["retry", "migration"]) -> None:
        """Another try begins, since an agent was lost."""
        self._attempt += 1
        lost, self._lost_leg = self._lost_leg or self._last_leg, None
        self._links = [] if lost is None else [(lost, {"kvferry.reason": why})]
        self._route = self._begin("route", time.monotonic())

    def begin_leg(self, leg: Literal["prefill", "decode"], about: Attributes) -> Span:
        """Begin the span of a leg; its end is `end_leg`."""
        name = "prefill" if leg == "prefill" else "whole" if self._is_alone else "decode"
        span = self._begin(f"{name} leg", time.monotonic(), about, kind="client")
        self._open_legs.add(span)
        self._last_leg = span
        return span

    def end_leg(self, span: Span, failure: str | None, *, is_loss: bool = False) -> None:
        """A leg is over. `failure` is a word for it, or `CANCELLED`; with `is_loss` its agent was lost."""
        self._open_legs.discard(span)
        if is_loss:
            self._lost_leg = span
        if failure == CANCELLED:
            span.set_attributes({"kvferry.cancelled": True})
        elif failure is not None:
            span.fail(failure)
        span.end(time.monotonic())

    def add_first_token(self, at: float) -> None:
        """The first text is on its way to the client of a stream."""
        self._span.add_event("first token", at)

    def end(self, status: int, code: str | None, at: float) -> None:
        """The request has ended with this HTTP status. By the conventions only 5xx are a server's errors."""
        self._end_route()
        for leg in tuple(self._open_legs):  # never sent
            self.end_leg(leg, CANCELLED)
        self._span.set_attributes({"http.response.status_code": status, "kvferry.attempts": self._attempt})
        if status >= 500:
            self._span.fail(code or str(status))
        elif code is not None:
            self._span.set_attributes({"error.type": code})
        self._span.end(at)

    def _begin(
        self,
        name: str,
        at: float,
        about: Attributes | None = None,
        kind: Literal["internal", "client"] = "internal",
    ) -> Span:
        attributes = {**(about or {}), "kvferry.attempt": self._attempt}
        return self._span.child(name, at, attributes, kind=kind, links=self._links)

    def _end_route(self) -> None:
        if self._route is not None:
            self._route.end(time.monotonic())
            self._route = None
