# SPDX-License-Identifier: Apache-2.0
"""Aborts requests at agents that hang, so that they can be retried elsewhere.

An agent that hangs, or whose host is down, keeps its connections open and sends nothing, and the idle timeout
is long because computing may take long. Its pings stop as well, though: a request without any progress, at an
agent that the fleet no longer believes to be alive, is aborted. One that cannot be retried elsewhere is left
to its deadlines: the agent may still come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.proxy.wire.registration import NODE_EXPIRY_S, Incarnation, Register

CHECK_INTERVAL_S = 0.5

LivenessQuery = Callable[[Sequence[Register]], frozenset[Incarnation]]
"""Which of these agents have stopped working."""


class PendingRequest(Protocol):
    """One request in flight at an agent."""

    @property
    def agent(self) -> Register: ...

    @property
    def can_retry(self) -> Callable[[], bool]:
        """Whether it could be retried elsewhere now; if not, it is never aborted."""

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

    async def run(
        self, find_hung: LivenessQuery, was_paused: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        """Check periodically until cancelled.

        Args:
            was_paused: Returns whether this process has paused since the last call: then pings and responses
                may be waiting to be read, and nothing is aborted. Called at every check.
            clock: The event loop's.
        """
        while True:
            if not was_paused():
                self.check(find_hung, clock())
            await asyncio.sleep(CHECK_INTERVAL_S)

    def check(self, find_hung: LivenessQuery, now: float) -> None:
        """Abort every request that has waited too long for an agent that hangs."""
        since = now - NODE_EXPIRY_S
        waiting = [request for request in self.pending if _is_overdue(request, since)]
        if not waiting:
            return
        agents = {request.agent.incarnation: request.agent for request in waiting}
        hung = find_hung(tuple(agents.values()))
        for request in waiting:
            if request.agent.incarnation in hung and _is_overdue(request, since):
                request.abort()


def _is_overdue(request: PendingRequest, since: float) -> bool:
    return request.waiting_since is not None and request.waiting_since <= since and request.can_retry()
