# SPDX-License-Identifier: Apache-2.0
"""One agent's circuit breaker: an agent that keeps failing gets no requests, but for a probe now and then.

| state | a leg succeeds | a leg fails | an attempt is sent there |
|---|---|---|---|
| closed | the count of failures is reset | one more; at the limit → open | – |
| open | – (it began before) | – (it began before) | once the pause is over → half open |
| half open | → closed | → open, for twice as long | it is the probe; the next one in a while |

The clock is an argument (monotonic seconds), as in the registry.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from kvferry.common.state_machine import transition
from kvferry.proxy.wire.registration import Incarnation

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 30.0
PROBE_INTERVAL_S = 1.0
"""The next probe is due after this, whatever became of the last: one whose client leaves proves nothing."""


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


BREAKER_TRANSITIONS: dict[BreakerState, frozenset[BreakerState]] = {
    BreakerState.CLOSED: frozenset({BreakerState.OPEN}),
    BreakerState.OPEN: frozenset({BreakerState.HALF_OPEN}),
    BreakerState.HALF_OPEN: frozenset({BreakerState.CLOSED, BreakerState.OPEN}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """`failures`: how many in a row open a breaker. `pause_s`: how long it then stays open, at first."""

    failures: int = 5
    pause_s: float = 1.0


class Breaker:
    """The breaker of one incarnation."""

    def __init__(self, agent: Incarnation, settings: BreakerSettings) -> None:
        self.state = BreakerState.CLOSED
        self._agent = agent
        self._settings = settings
        self.failures = 0
        """In a row; to be read only."""
        self._pause_s = settings.pause_s
        self._due_at = 0.0
        """When the next attempt may go there, while not closed."""

    def allows(self, now: float) -> bool:
        """Return whether an attempt may be sent there."""
        return self.state is BreakerState.CLOSED or now >= self._due_at

    @property
    def due_at(self) -> float | None:
        """When time alone makes `allows` true, if it is not; None while closed."""
        return None if self.state is BreakerState.CLOSED else self._due_at

    def sent(self, now: float) -> None:
        """Count an attempt that is sent there; only while `allows` it."""
        if self.state is BreakerState.OPEN:
            self._transition(BreakerState.HALF_OPEN)
        if self.state is BreakerState.HALF_OPEN:
            self._due_at = now + PROBE_INTERVAL_S

    def succeeded(self) -> None:
        """Count a leg that ended as it should."""
        self.failures = 0
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = self._settings.pause_s
            self._transition(BreakerState.CLOSED)

    def failed(self, now: float) -> None:
        """Count a leg that was lost, timed out, or got an invalid response."""
        match self.state:
            case BreakerState.CLOSED:
                self.failures += 1
                if self.failures >= self._settings.failures:
                    self._open(now)
            case BreakerState.HALF_OPEN:
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
                self._open(now)
            case BreakerState.OPEN:
                pass

    def _open(self, now: float) -> None:
        self._transition(BreakerState.OPEN)
        self._due_at = now + self._pause_s

    def _transition(self, to: BreakerState) -> None:
        """Raises `IllegalTransition` when the table does not allow it."""
        subject = f"circuit breaker of agent {self._agent}"
        previous, self.state = self.state, transition(subject, BREAKER_TRANSITIONS, self.state, to)
        level = logging.WARNING if to is BreakerState.OPEN else logging.INFO
        logger.log(level, "%s: %s → %s", subject, previous, to)
