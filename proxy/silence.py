# SPDX-License-Identifier: Apache-2.0
"""The legs that are open at agents, so that those of an agent which hangs can be given up.

An agent that hangs, or whose host has gone, keeps its connections and says nothing on them, and the deadlines
for silence within an answer are long because computing may take long. Its pings end as well, though: a leg
that says nothing, at an agent that the fleet no longer believes to work, is lost, and may go on elsewhere.
Where there is no elsewhere it is left to its deadlines: the agent may still come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from proxy.errors import NoAgent
from proxy.fleet import Fleet
from proxy.wire import NODE_EXPIRY_S, Incarnation, Register

LOOK_INTERVAL_S = 0.5


class Wait(Protocol):
    """Something that an agent is to send."""

    @property
    def since(self) -> float | None:
        """When this wait began, on the event loop's clock; None while nobody waits."""

    def end(self) -> None:
        """Have it fail with `TimeoutError`, now. Called once."""


@dataclass(frozen=True, slots=True)
class _TimedWait:
    timeout: asyncio.Timeout
    since: float

    def end(self) -> None:
        if not self.timeout.expired():
            self.timeout.reschedule(self.since)


class OpenLeg:
    """One request under way at an agent. `given_up`: its last wait was ended because the agent is lost.

    Args:
        movable: Whether it may go elsewhere now; one that may not is never given up.
    """

    def __init__(self, agent: Register, movable: Callable[[], bool]) -> None:
        self.agent = agent
        self._movable = movable
        self.given_up = False
        self._wait: Wait | None = None

    @asynccontextmanager
    async def waiting(self, by: float) -> AsyncIterator[None]:
        """The body waits for the agent. Raises `TimeoutError` at `by`, or when the leg is given up."""
        async with asyncio.timeout_at(by) as timeout:
            with self.watched(_TimedWait(timeout, asyncio.get_running_loop().time())):
                yield

    @contextmanager
    def watched(self, wait: Wait) -> Iterator[None]:
        """The body waits for the agent now and then, as `wait` says."""
        self._wait = wait
        try:
            yield
        finally:
            self._wait = None

    def is_quiet(self, since: float) -> bool:
        """Whether something has been waited for since then, and there would be another try."""
        if self.given_up or self._wait is None:
            return False
        began = self._wait.since
        return began is not None and began <= since and self._movable()

    def give_up(self) -> None:
        """End the wait of a quiet leg."""
        assert self._wait is not None, "nothing is waited for"
        self.given_up = True
        self._wait.end()


class OpenLegs:
    """All open legs of one process. `run` must have an owner for as long as legs are opened."""

    def __init__(self) -> None:
        self._open: set[OpenLeg] = set()

    @contextmanager
    def open(self, agent: Register, movable: Callable[[], bool]) -> Iterator[OpenLeg]:
        """One leg, for as long as the body runs."""
        leg = OpenLeg(agent, movable)
        self._open.add(leg)
        try:
            yield leg
        finally:
            self._open.discard(leg)

    async def run(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        """Give up, for ever, what agents have let hang. `clock`: the event loop's."""
        looked_at = clock()
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            now = clock()
            # After a pause of this process itself, pings and answers may be waiting to be read.
            if now - looked_at < 2 * LOOK_INTERVAL_S:
                await self.look(fleet, now)
            looked_at = clock()

    async def look(self, fleet: Fleet, now: float) -> None:
        """Give up every leg that has been quiet for too long, at an agent that is lost."""
        since = now - NODE_EXPIRY_S
        quiet = [leg for leg in self._open if leg.is_quiet(since)]
        if not quiet:
            return
        agents = {leg.agent.incarnation: leg.agent for leg in quiet}
        try:
            lost = await fleet.find_lost(tuple(agents.values()))
        except NoAgent:  # nobody can tell
            return
        for leg in quiet:
            if Incarnation(leg.agent.incarnation) in lost and leg.is_quiet(since):
                leg.give_up()
