# SPDX-License-Identifier: Apache-2.0
"""Where the latest requests went, by their ids, for the operator's page. Bounded; costs nothing per token."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

MAX_REQUESTS = 1000
MAX_STEPS = 128
"""Of one request."""
MAX_TEXT_CHARS = 300
_ROUTED, _LOST = "routed", "lost"


@dataclass(slots=True, eq=False)
class Timeline:
    """One request on its way. Times are monotonic seconds."""

    request_id: str
    endpoint: str
    arrived_at: float
    steps: list[tuple[float, str, tuple[str, ...]]] = field(default_factory=list)
    """When each phase began, an attempt was routed, or was lost."""
    model: str = ""
    agent_timing: Sequence[str] = ()
    first_text_at: float | None = None
    status: int | None = None
    """None while it is under way."""
    code: str | None = None
    message: str = ""

    def enter(self, phase: str, at: float) -> None:
        """Record that a phase has begun."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append((at, phase, ()))

    def add_attempt(self, at: float, prefill: str, decode: str, transfer_id: str) -> None:
        """Record where it was routed."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append((at, _ROUTED, (prefill, decode, transfer_id)))

    def add_loss(self, at: float, why: str) -> None:
        """Record that an attempt has failed that another one may follow."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append((at, _LOST, (why[:MAX_TEXT_CHARS],)))

    def page(self) -> dict[str, Any]:
        """Return what the operator's page shows, in seconds since the request's arrival."""
        now, ended = time.monotonic(), self.status is not None
        phases = [(phase, self._since(at)) for at, phase, _ in self.steps if phase not in (_ROUTED, _LOST)]
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
                if what == _ROUTED
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
