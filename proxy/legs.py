# SPDX-License-Identifier: Apache-2.0
"""The legs that are open at every agent, so that those of an agent which hangs can be given up.

An agent that hangs, or whose host has gone, keeps its connections and says nothing on them, and the deadlines
for silence within an answer are long because computing may take long. Its pings end as well, though: a leg
that says nothing, at an agent that the registry no longer believes to work, is lost, and may go on elsewhere.
Where there is no elsewhere it is left to its deadlines: the agent may still come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from proxy.registry import Registry
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


class Leg:
    """One request under way at an agent. `given_up`: its last wait was ended because the agent is lost.

    Args:
        movable: Whether it may go elsewhere now; one that may not is never given up.
    """

    def __init__(self, movable: Callable[[], bool]) -> None:
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

    def give_up(self, quiet_since: float) -> None:
        """End the wait if it began no later than that, and if there is another try. Idempotent."""
        if self.given_up or self._wait is None:
            return
        since = self._wait.since
        if since is not None and since <= quiet_since and self._movable():
            self.given_up = True
            self._wait.end()


class Legs:
    """All open legs of one proxy. `run` must have an owner for as long as legs are opened."""

    def __init__(self) -> None:
        self._open: dict[Incarnation, dict[Leg, Register]] = {}

    @contextmanager
    def open(self, agent: Register, movable: Callable[[], bool]) -> Iterator[Leg]:
        """One leg, for as long as the body runs."""
        leg, incarnation = Leg(movable), Incarnation(agent.incarnation)
        self._open.setdefault(incarnation, {})[leg] = agent
        try:
            yield leg
        finally:
            legs = self._open[incarnation]
            del legs[leg]
            if not legs:
                del self._open[incarnation]

    async def run(self, registry: Registry, clock: Callable[[], float]) -> None:
        """Give up, for ever, what agents have let hang. `clock` is the one that the registry is told."""
        looked_at = clock()
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            now = clock()
            # After a pause of this process itself, pings and answers may be waiting to be read.
            if now - looked_at < 2 * LOOK_INTERVAL_S:
                self.look(registry, now)
            looked_at = now

    def look(self, registry: Registry, now: float) -> None:
        """Give up what has been quiet for too long, at agents that do not work any more but others do."""
        for agent, legs in self._open.items():
            if registry.works(agent, now) or not registry.has_substitute(next(iter(legs.values())), now):
                continue
            for leg in legs:
                leg.give_up(now - NODE_EXPIRY_S)
