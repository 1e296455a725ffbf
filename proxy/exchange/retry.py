# SPDX-License-Identifier: Apache-2.0
"""Whether a request may be tried again: its own limits, and what retries may add to everybody's load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.proxy.errors import AgentLost, StreamBroken
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Phase, RequestLog

RATIO = 0.1
RESERVE = 64.0
MAX_SAVED = 1024.0


class RetryBudget:
    """A token bucket that requests fill and retries empty.

    In the long run retries are at most a tenth of the requests. `RESERVE` lets a small fleet, or one that has
    just started, survive the death of an agent under load; `MAX_SAVED` bounds what is saved up. Retries of
    what an agent that is down would have done (`AgentLost.is_down`) add no load, and are not counted.
    """

    def __init__(self, reserve: float = RESERVE) -> None:
        self._tokens = reserve

    def deposit(self) -> None:
        """Count a client's request."""
        self._tokens = min(self._tokens + RATIO, MAX_SAVED)

    def try_withdraw(self) -> bool:
        """Return whether a retry may be made, and count it as made."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(slots=True)
class Retries:
    """How many more attempts one request may make: to *migrate* a stream that has begun, else to *retry*."""

    log: RequestLog
    budget: RetryBudget
    metrics: Metrics
    retries: int
    migrations: int

    def has_more(self) -> bool:
        """Whether the request's own limits allow another attempt, as things stand."""
        return (self.migrations if self._migrates else self.retries) > 0

    def use_one(self, lost: AgentLost, leg: Literal["prefill", "decode"]) -> None:
        """Count another attempt, after `leg` has lost its agent.

        Raises `lost`, or `StreamBroken` where the client has events already, if there may be no other.
        """
        if not self._is_allowed(lost):
            if self._migrates:
                raise StreamBroken(lost.message) from lost
            raise lost
        if self._migrates:
            self.migrations -= 1
            self.metrics.migrations.inc()
        else:
            self.retries -= 1
            self.metrics.retries.labels(leg).inc()

    @property
    def _migrates(self) -> bool:
        return self.log.phase is Phase.DECODE

    def _is_allowed(self, lost: AgentLost) -> bool:
        if not self.has_more():
            return False
        if lost.is_down or self.budget.try_withdraw():
            return True
        self.metrics.retries_denied.inc()
        return False
