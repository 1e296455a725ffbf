# SPDX-License-Identifier: Apache-2.0
"""Aborts requests at agents that hang.

An agent that hangs, or whose host is down, keeps its connections open and sends nothing, and the idle timeout
is long because computing may take long. Its pings stop as well, though. A request without any progress is
aborted as soon as the fleet takes its agent for dead, if it can be retried elsewhere. If it cannot, it is
aborted once the agent has sent no ping for so long that it hardly comes back: its client gets an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvferry.proxy.wire.registration import NODE_EXPIRY_S, Incarnation, Register

CHECK_INTERVAL_S = 0.5


class AgentLiveness(Protocol):
    """Which agents work, as far as their pings say (`Registry`)."""

    def find_hung(self, agents: Sequence[Register], /) -> frozenset[Incarnation]:
        """Those that have stopped working, where others can do what they did."""

    def find_silent(self, agents: Sequence[Register], /) -> frozenset[Incarnation]:
        """Those whose pings stopped so long ago that they are most likely gone."""

    def check_pause(self) -> bool:
        """Whether this process has paused since the last call: then pings and responses may be waiting to be
        read.
        """


class PendingRequest(Protocol):
    """One request in flight at an agent."""

    @property
    def agent(self) -> Register: ...

    @property
    def can_retry(self) -> Callable[[], bool]:
        """Whether it could be retried elsewhere now."""

    @property
    def waiting_since(self) -> float | None:
        """Since when the agent has made no progress, on the event loop's clock; None if it is not awaited."""

    def abort(self) -> None:
        """Fail the pending wait. Called at most once, and only while `waiting_since` is not None."""


class HangDetector:
    """Watches requests of this process. `run` needs an owner for as long as there are any."""

    def __init__(self) -> None:
        self.pending: set[PendingRequest] = set()
        """Those that are in flight."""

    async def run(self, liveness: AgentLiveness, clock: Callable[[], float]) -> None:
        """Check periodically until cancelled, but abort nothing after a pause. `clock`: the event loop's."""
        while True:
            if not liveness.check_pause():
                self.check(liveness, clock())
            await asyncio.sleep(CHECK_INTERVAL_S)

    def check(self, liveness: AgentLiveness, now: float) -> None:
        """Abort every request that has waited too long for an agent that hangs."""
        since = now - NODE_EXPIRY_S
        waiting = [request for request in self.pending if _is_overdue(request, since)]
        if not waiting:
            return
        hung = liveness.find_hung(_agents(request for request in waiting if request.can_retry()))
        silent = liveness.find_silent(_agents(waiting))
        for request in waiting:
            agent = request.agent.incarnation
            if agent in silent or (agent in hung and request.can_retry()):
                request.abort()


def _agents(requests: Iterable[PendingRequest]) -> Sequence[Register]:
    """Return the agents of the requests, each once."""
    return tuple({request.agent.incarnation: request.agent for request in requests}.values())


def _is_overdue(request: PendingRequest, since: float) -> bool:
    return request.waiting_since is not None and request.waiting_since <= since
