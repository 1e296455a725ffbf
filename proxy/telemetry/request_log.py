# SPDX-License-Identifier: Apache-2.0
"""The life of one request: its phases, its times, the one line that is logged when it ends, and, for the
operator's page, where the latest requests went. In bounded memory; costs nothing per token.
"""

from __future__ import annotations

import enum
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from kvferry.common.state_machine import transition
from kvferry.common.telemetry.logs import Facts
from kvferry.proxy import sse
from kvferry.proxy.fleet.routing.routing_request import Pair
from kvferry.proxy.fleet.snapshot import Prediction
from kvferry.proxy.ids import Api, RequestId, TransferId
from kvferry.proxy.request import ClientRequest, ReportedUsage
from kvferry.proxy.telemetry.history import Failure, FailureLog
from kvferry.proxy.telemetry.metrics import CLIENT_LEFT, Metrics
from kvferry.proxy.telemetry.request_trace import RequestTrace

logger = logging.getLogger(__name__)

MAX_AGENT_TIMINGS = 16
"""Most entries of one agent's `Server-Timing` that are passed on."""
_AGENT_TIMING = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31};dur=[0-9]{1,9}(\.[0-9]{1,6})?")
MAX_MODEL_CHARS = 100
MAX_REQUESTS = 1000
MAX_STEPS = 128
"""Most steps that are remembered of one request."""
MAX_TEXT_CHARS = 300
ROUTED, _LOST = "routed", "lost"
MAX_PROMPT_CHARS = 4096


class Phase(enum.StrEnum):
    """The phase of a request."""

    __hash__ = str.__hash__  # an enum's own is not C, and every phase is a key several times

    ROUTE = "route"
    PREFILL = "prefill"
    DECODE_WAIT = "decode_wait"
    """The decode leg (or the only leg) was sent, and its first event has not come yet."""
    DECODE = "decode"
    ENDED = "ended"


# Back to ROUTE is a retry; from DECODE it is a migration.
PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.ROUTE: frozenset({Phase.PREFILL, Phase.DECODE_WAIT, Phase.ENDED}),
    Phase.PREFILL: frozenset({Phase.ROUTE, Phase.DECODE_WAIT, Phase.ENDED}),
    Phase.DECODE_WAIT: frozenset({Phase.ROUTE, Phase.DECODE, Phase.ENDED}),
    Phase.DECODE: frozenset({Phase.ROUTE, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


_LEGS = {
    Phase.ROUTE: "route",
    Phase.PREFILL: "prefill",
    Phase.DECODE_WAIT: "decode",
    Phase.DECODE: "decode",
}


_SENT = frozenset({Phase.PREFILL, Phase.DECODE_WAIT})
"""A phase begins with a leg that is sent to an agent."""


@dataclass(slots=True, eq=False)
class Timeline:
    """One request on its way. Times are monotonic seconds."""

    request_id: str
    endpoint: str
    arrived_at: float
    steps: list[tuple[float, str, tuple[str, ...]]] = field(default_factory=list)
    """When each phase began, an attempt was routed, or was lost, with details."""
    model: str = ""
    agent_timing: Sequence[str] = ()
    first_text_at: float | None = None
    status: int | None = None
    """None while it is under way."""
    code: str | None = None
    message: str = ""

    def add(self, at: float, what: str, *details: str) -> None:
        """Record that a phase has begun, or an attempt was routed."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append((at, what, details))

    def add_loss(self, at: float, why: str) -> None:
        """Record that an attempt has failed that another one may follow."""
        self.add(at, _LOST, why[:MAX_TEXT_CHARS])

    def page(self) -> dict[str, Any]:
        """Return what the operator's page shows, in seconds since the request's arrival."""
        now, ended = time.monotonic(), self.status is not None
        phases = [(phase, self._since(at)) for at, phase, _ in self.steps if phase not in (ROUTED, _LOST)]
        ends = [at for _, at in phases[1:]]
        return {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "model": self.model,
            "arrived": time.time() - (now - self.arrived_at),
            "status": self.status,
            "code": self.code,
            "message": self.message,
            "first_text_s": None if self.first_text_at is None else self._since(self.first_text_at),
            "total_s": phases[-1][1] if ended and phases else self._since(now),
            "phases": [
                {"phase": phase, "start_s": at, "end_s": end}
                for (phase, at), end in zip_longest(phases, ends)
                if phase != "ended"
            ],
            "attempts": [
                {
                    "at_s": self._since(at),
                    "prefill": details[0],
                    "decode": details[1],
                    "transfer_id": details[2],
                }
                for at, what, details in self.steps
                if what == ROUTED
            ],
            "losses": [
                {"at_s": self._since(at), "reason": details[0]}
                for at, what, details in self.steps
                if what == _LOST
            ],
            "agent_timing": list(self.agent_timing),
        }

    def _since(self, at: float) -> float:
        return round(at - self.arrived_at, 6)


class Timelines:
    """The latest `MAX_REQUESTS` requests. Of several with one id, the last."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Timeline] = OrderedDict()

    def begin(self, request_id: str, endpoint: str, arrived_at: float) -> Timeline:
        """Record a request that has arrived."""
        timeline = Timeline(request_id, endpoint, arrived_at)
        self._by_id.pop(request_id, None)
        self._by_id[request_id] = timeline
        if len(self._by_id) > MAX_REQUESTS:
            self._by_id.popitem(last=False)
        return timeline

    def find(self, request_id: str) -> Timeline | None:
        """Return a request that is remembered."""
        return self._by_id.get(request_id)


class RequestLog:
    """The phases, times and facts of one request. Every request ends exactly once, by `end`.

    `trace`, where traces are on, gets them too; it ends with this.
    """

    def __init__(
        self,
        api: Api,
        request_id: RequestId,
        metrics: Metrics,
        failures: FailureLog,
        timelines: Timelines,
        trace: RequestTrace | None = None,
        arrived_at: float | None = None,
    ) -> None:
        self.api = api
        self.request_id = request_id
        self.phase = Phase.ROUTE
        self.arrived_at = time.monotonic() if arrived_at is None else arrived_at
        self.trace = trace
        self.trace_id = None if trace is None else trace.trace_id
        self._metrics = metrics
        self._failures = failures
        self._timeline = timelines.begin(request_id, api, self.arrived_at)
        self._timeline.add(self.arrived_at, self.phase)
        self._phase_since = self.arrived_at
        self._seconds: dict[Phase, float] = {}
        self._facts: dict[str, object] = {}
        self._prediction: Prediction | None = None
        """The latest attempt's."""
        self._transfer_ids: list[TransferId] = []
        self._choices = 1
        self._model = ""
        self._agents: tuple[str, str] | None = None
        """Where the latest attempt's prefill and decode legs go."""
        self._agent = ""
        """The address of the agent that the request was sent to last."""
        self._model_metrics = metrics.of_model("")
        self._agent_timing: list[str] = []
        self.num_events = 0
        """How many events of a stream were sent to the client."""
        self.first_text_at: float | None = None
        """When the first text of a stream went to the client; monotonic seconds."""
        self._first_event_at: float | None = None
        self._last_event_at: float | None = None
        self._decode_began: tuple[float, int] | None = None
        """When the first event of the decode leg came, and how many came before it."""
        metrics.in_flight.add((self.phase, ""), 1)

    def enter(self, phase: Phase) -> None:
        """Move on to `phase`. Raises `IllegalTransition` when the table does not allow it."""
        before, in_flight, of_model = self.phase, self._metrics.in_flight, self._model_metrics
        now = time.monotonic()
        self.phase = transition(self.request_id, PHASE_TRANSITIONS, before, phase)
        spent = now - self._phase_since
        self._phase_since = now
        self._timeline.add(now, phase)
        if self._agents is not None and phase in _SENT:
            self._agent = self._agents[phase is not Phase.PREFILL]
        self._seconds[before] = self._seconds.get(before, 0.0) + spent
        of_model.phases[before].observe(spent)
        if phase is Phase.ENDED:
            in_flight.add((before, of_model.model), -1)
        else:
            in_flight.move((before, of_model.model), (phase, of_model.model))
        if phase is Phase.ROUTE and self.trace is not None:
            self.trace.route_again("migration" if before is Phase.DECODE else "retry")
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %s → %s", self.request_id, before, phase, extra=self.log_ids())

    def count_tokens(self, usage: ReportedUsage) -> None:
        """Count what the request has used. Call once, when it has ended."""
        self._metrics.prompt_tokens.add(self._model_metrics.model, usage.prompt_tokens)
        self._metrics.generation_tokens.add(self._model_metrics.model, usage.completion_tokens)

    def log_ids(self) -> dict[str, str | None]:
        """The `extra` of other log lines about the request."""
        return {"request_id": self.request_id, "trace_id": self.trace_id}

    def set_traceparent(self, traceparent: str | None) -> None:
        """Record the trace of a client's that goes on at the agents, where this proxy makes none."""
        if self.trace_id is None and traceparent is not None:
            self.trace_id = traceparent.split("-")[1]

    def set_request(self, request: ClientRequest, *, show_prompt: bool = False) -> None:
        """Record the parsed request. `show_prompt`: log its prompt too."""
        self._choices = request.sequences
        self._model = self._timeline.model = request.model[:MAX_MODEL_CHARS]
        before, self._model_metrics = self._model_metrics, self._metrics.of_model(request.model)
        self._metrics.in_flight.move((self.phase, before.model), (self.phase, self._model_metrics.model))
        self._facts |= {"model": self._model, "stream": request.stream, "n": request.n}
        if self.trace is not None:
            self.trace.describe(
                {
                    "gen_ai.request.model": self._model,
                    "gen_ai.request.choice.count": request.n,
                    "kvferry.stream": request.stream,
                }
            )
        if show_prompt:
            self._facts["prompt"] = _beginning(bytes(request.prompt))

    def add_attempt(self, pair: Pair, transfer_id: TransferId) -> None:
        """Record that the request was routed, perhaps again."""
        first, second = pair.prefill.info, pair.decode.info
        self._prediction = pair.prediction
        prefill = first.address if first.dp_rank is None else first.location  # most have none
        decode = second.address if second.dp_rank is None else second.location
        self._agents = prefill, decode
        self._facts |= {"prefill": prefill, "decode": decode}
        self._timeline.add(time.monotonic(), ROUTED, prefill, decode, "" if pair.alone else transfer_id)
        if not pair.alone:
            self._transfer_ids.append(transfer_id)
        if self.trace is not None:
            self.trace.routed(prefill, decode, "" if pair.alone else transfer_id)

    def add_loss(self, why: str) -> None:
        """Record why an attempt has failed that another one may follow."""
        self._timeline.add_loss(time.monotonic(), why)

    def add_transfers(self, transfer_ids: Sequence[TransferId]) -> None:
        """Record further transfers of the attempt; other engines need one for each choice."""
        self._transfer_ids += transfer_ids

    def events(self, events: bytes) -> None:
        """Count whole events that are about to be sent to the client."""
        now = time.monotonic()
        if self.phase is Phase.DECODE_WAIT:
            self.enter(Phase.DECODE)
            self._decode_began = now, self.num_events
        if self._last_event_at is None:
            self._first_event_at = now
        else:
            self._model_metrics.itl.observe(now - self._last_event_at)
        self._last_event_at = now
        count = sse.count(events)
        self.num_events += count
        self._metrics.events += count
        self._model_metrics.counts.events += count
        if self.first_text_at is None and sse.has_text(events):
            self.first_text_at = self._timeline.first_text_at = now
            ttft = now - self.arrived_at
            self._model_metrics.ttft.observe(ttft)
            if ttft > self._model_metrics.objective.ttft_s:
                self._metrics.missed_objectives.add(("ttft", self._model_metrics.model), 1)
            if self.trace is not None:
                self.trace.add_first_token(now)

    def event(self, event: bytes) -> None:
        """`events` for a single event, with a cheaper path for all but the first."""
        last = self._last_event_at
        if self.phase is not Phase.DECODE or self.first_text_at is None or last is None:
            self.events(event)
            return
        self._last_event_at = now = time.monotonic()
        self._model_metrics.itl.observe(now - last)
        self.num_events += 1
        self._metrics.events += 1
        self._model_metrics.counts.events += 1

    def time_per_token(self) -> float | None:
        """Return the mean seconds per token of a stream, after the first one; None if there is no stream."""
        later_events = self.num_events / self._choices - 1
        if self._first_event_at is None or self._last_event_at is None or later_events <= 0:
            return None
        return (self._last_event_at - self._first_event_at) / later_events

    def decode_time_per_token(self) -> float | None:
        """Return the same from the first event of the decode leg on: a pair's first token comes before it,
        and its KV is transferred in between.
        """
        if self._decode_began is None or self._last_event_at is None:
            return None
        began_at, events_before = self._decode_began
        later_events = (self.num_events - events_before) / self._choices - 1
        return (self._last_event_at - began_at) / later_events if later_events > 0 else None

    def add_agent_timing(self, leg: str, header: str | None) -> None:
        """Record an agent's own `Server-Timing` header, if it sent one: the names with a duration in it."""
        if header:
            timings = (each.strip() for each in header.split(",", MAX_AGENT_TIMINGS)[:MAX_AGENT_TIMINGS])
            self._agent_timing += [f"{leg}.{each}" for each in timings if _AGENT_TIMING.fullmatch(each)]

    def leg_seconds(self) -> dict[str, float]:
        """How long routing and each leg took, as measured here; only those that have begun."""
        spent = dict(self._seconds)
        if self.phase is not Phase.ENDED:
            spent[self.phase] = spent.get(self.phase, 0.0) + time.monotonic() - self._phase_since
        seconds: dict[str, float] = {}
        for phase, name in _LEGS.items():
            if phase in spent:
                seconds[name] = seconds.get(name, 0.0) + spent[phase]
        return seconds

    def server_timing(self) -> str:
        """The `Server-Timing` header (W3C), in milliseconds: the legs, then the agents' own timing.

        For a stream it covers what came before the first event.
        """
        legs = [f"{name};dur={seconds * 1e3:.3f}" for name, seconds in self.leg_seconds().items()]
        return ", ".join(legs + self._agent_timing)

    def end(self, status: int, code: str | None = None, message: str = "") -> None:
        """End the request with this HTTP status (for an error event: the one it stands for); `code` and
        `message` are an error's.
        """
        self.enter(Phase.ENDED)
        total = self._phase_since - self.arrived_at
        self._timeline.status, self._timeline.code = status, code
        self._timeline.message = message = message[:MAX_TEXT_CHARS]
        self._timeline.agent_timing = self._agent_timing
        of_model = self._model_metrics
        self._metrics.ended(self.api, status, of_model.model)
        of_model.e2e.observe(total)
        tpot = self.time_per_token()
        if tpot is not None:
            of_model.tpot.observe(tpot)
            if tpot > of_model.objective.tpot_s:
                self._metrics.missed_objectives.add(("tpot", of_model.model), 1)
        if self.trace is not None:
            self.trace.end(status, code, self._phase_since)
        self._remember(status, code or "", message)
        if logger.isEnabledFor(logging.INFO):
            logger.info("request %s", Facts(self._line(status, code, message, total)))

    def _remember(self, status: int, code: str, message: str) -> None:
        if status >= 400 and status != CLIENT_LEFT:
            failure = Failure(
                endpoint=self.api,
                status=status,
                code=code,
                message=message,
                model=self._model,
                request_id=self.request_id,
                agent=self._agent,
            )
            self._failures.add(failure, self._phase_since)

    def _line(self, status: int, code: str | None, message: str | None, total: float) -> dict[str, object]:
        """Never includes responses, and prompts only if configured: user content stays out of logs."""
        line: dict[str, object] = {
            "request_id": self.request_id,
            **({} if self.trace_id is None else {"trace_id": self.trace_id}),
            "endpoint": self.api,
            "status": status,
            **({} if code is None else {"code": code}),
            **({} if message is None else {"error": message}),
            **self._facts,
            "transfer_ids": self._transfer_ids,
            "total_s": round(total, 6),
            "phases_s": {phase: round(spent, 6) for phase, spent in self._seconds.items()},
        }
        if self.first_text_at is not None:
            line["ttft_s"] = round(self.first_text_at - self.arrived_at, 6)
        if (prediction := self._prediction) is not None:
            line["predicted_ttft_s"] = round(prediction.first_token_at - self.arrived_at, 6)
            if prediction.token_s is not None:
                line["predicted_tpot_s"] = round(prediction.token_s, 6)
        return line


def _beginning(text: bytes) -> str:
    return text[: 4 * MAX_PROMPT_CHARS].decode(errors="ignore")[:MAX_PROMPT_CHARS]
