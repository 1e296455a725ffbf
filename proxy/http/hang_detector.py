# SPDX-License-Identifier: Apache-2.0
"""The legs that are open at agents, so that those of an agent which hangs can be given up.

An agent that hangs, or whose host has gone, keeps its connections and says nothing on them, and the deadlines
for silence within an answer are long because computing may take long. Its pings end as well, though: a leg
that says nothing, at an agent that the fleet no longer believes to work, is lost, and may go on elsewhere.
Where there is no elsewhere it is left to its deadlines: the agent may still come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvferry.proxy.errors import NoAgent
from kvferry.proxy.fleet.interface import Fleet
from kvferry.proxy.wire.messages import NODE_EXPIRY_S, Incarnation, Register

LOOK_INTERVAL_S = 0.5


class OpenLeg(Protocol):
    """One request under way at an agent."""

    @property
    def agent(self) -> Register: ...

    @property
    def movable(self) -> Callable[[], bool]:
        """Whether it may go elsewhere now; one that may not is never given up."""

    @property
    def quiet_since(self) -> float | None:
        """Since when the agent is waited for in vain, on the event loop's clock; None while nobody waits."""

    def give_up(self) -> None:
        """Have the wait fail. Called of a leg that is quiet, and once."""


class OpenLegs:
    """All open legs of one process. `run` must have an owner for as long as legs are opened."""

    def __init__(self) -> None:
        self._open: set[OpenLeg] = set()

    def add(self, leg: OpenLeg) -> None:
        """A request was sent."""
        self._open.add(leg)

    def discard(self, leg: OpenLeg) -> None:
        """It has ended, one way or another."""
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
        quiet = [leg for leg in self._open if _is_quiet(leg, since)]
        if not quiet:
            return
        agents = {leg.agent.incarnation: leg.agent for leg in quiet}
        try:
            lost = await fleet.find_lost(tuple(agents.values()))
        except NoAgent:  # nobody can tell
            return
        for leg in quiet:
            if Incarnation(leg.agent.incarnation) in lost and _is_quiet(leg, since):
                leg.give_up()


def _is_quiet(leg: OpenLeg, since: float) -> bool:
    return leg.quiet_since is not None and leg.quiet_since <= since and leg.movable()
