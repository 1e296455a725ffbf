# SPDX-License-Identifier: Apache-2.0
"""The life of one request: its phases, its times, and the one line that is logged when it ends."""

from __future__ import annotations

import enum
import json
import logging
import time

from proxy import sse
from proxy.ids import Endpoint, RequestId, TransferId
from proxy.metrics import Metrics
from proxy.openai_api import ClientRequest
from proxy.router import Pair

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499


class Phase(enum.StrEnum):
    """Where a request stands."""

    ROUTE = "route"
    PREFILL = "prefill"
    DECODE_WAIT = "decode_wait"
    """The decode leg (or the only leg) was sent, and its first event has not come yet."""
    DECODE = "decode"
    ENDED = "ended"


# Back to ROUTE is a retry; it is impossible once the decode leg's first event has come.
_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.ROUTE: frozenset({Phase.PREFILL, Phase.DECODE_WAIT, Phase.ENDED}),
    Phase.PREFILL: frozenset({Phase.ROUTE, Phase.DECODE_WAIT, Phase.ENDED}),
    Phase.DECODE_WAIT: frozenset({Phase.ROUTE, Phase.DECODE, Phase.ENDED}),
    Phase.DECODE: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Record:
    """What happened to one request, from its arrival to its end. Every request ends exactly once."""

    def __init__(self, endpoint: Endpoint, request_id: RequestId, metrics: Metrics) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self.phase = Phase.ROUTE
        self.arrived_at = time.monotonic()
        self._metrics = metrics
        self._phase_since = self.arrived_at
        self._seconds: dict[Phase, float] = {}
        self._facts: dict[str, object] = {}
        self._transfer_ids: list[TransferId] = []
        self._choices = 1
        self._events = 0
        self._first_text_at: float | None = None
        self._first_event_at: float | None = None
        self._last_event_at: float | None = None
        metrics.in_flight.labels(self.phase).inc()

    def enter(self, phase: Phase) -> None:
        """Move on to `phase`. Raises `AssertionError` when the table does not allow it."""
        assert phase in _NEXT[self.phase], f"request {self.request_id}: {self.phase} → {phase}"
        now = time.monotonic()
        spent = now - self._phase_since
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + spent
        self._metrics.phases.labels(self.phase).observe(spent)
        self._metrics.in_flight.labels(self.phase).dec()
        logger.debug("request %s: %s → %s", self.request_id, self.phase, phase)
        self.phase = phase
        self._phase_since = now
        if phase is not Phase.ENDED:
            self._metrics.in_flight.labels(phase).inc()

    def tell_request(self, request: ClientRequest) -> None:
        """The body was read."""
        self._choices = request.n
        self._facts |= {"model": request.model, "stream": request.stream, "n": request.n}

    def tell_attempt(self, pair: Pair, transfer_id: TransferId) -> None:
        """The request was routed, maybe again."""
        self._facts |= {"prefill": pair.prefill.info.address, "decode": pair.decode.info.address}
        if not pair.alone:
            self._transfer_ids.append(transfer_id)

    def events(self, events: bytes) -> None:
        """Whole events are about to be given to the client."""
        now = time.monotonic()
        if self._last_event_at is None:
            self._first_event_at = now
        else:
            self._metrics.itl.observe(now - self._last_event_at)
        self._last_event_at = now
        self._events += sse.count(events)
        if self._first_text_at is None and sse.has_text(events):
            self._first_text_at = now
            self._metrics.ttft.observe(now - self.arrived_at)

    def end(self, status: int, code: str | None = None) -> None:
        """The request has ended with this HTTP status (or the one its error event stands for)."""
        self.enter(Phase.ENDED)
        total = self._phase_since - self.arrived_at
        self._metrics.requests.labels(self.endpoint, str(status)).inc()
        self._metrics.e2e.observe(total)
        later_events = self._events / self._choices - 1
        if self._first_event_at is not None and self._last_event_at is not None and later_events > 0:
            self._metrics.tpot.observe((self._last_event_at - self._first_event_at) / later_events)
        logger.info("request %s", json.dumps(self._line(status, code, total)))

    def _line(self, status: int, code: str | None, total: float) -> dict[str, object]:
        """No prompts and no answers: what users say stays out of the logs."""
        line: dict[str, object] = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "status": status,
            **({} if code is None else {"code": code}),
            **self._facts,
            "transfer_ids": self._transfer_ids,
            "total_s": round(total, 6),
            "phases_s": {phase: round(spent, 6) for phase, spent in self._seconds.items()},
        }
        if self._first_text_at is not None:
            line["ttft_s"] = round(self._first_text_at - self.arrived_at, 6)
        return line
