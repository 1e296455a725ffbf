# SPDX-License-Identifier: Apache-2.0
"""Poison requests: detection of a request that crashes the agents which serve it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvferry.proxy.errors import AgentLost, AgentTimeout, SuspectRequest
from kvferry.proxy.exchange.legs import AgentFailure
from kvferry.proxy.fleet.registry import Place, Registry
from kvferry.proxy.http.pool import now
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import RequestLog
from kvferry.proxy.wire.registration import NODE_EXPIRY_S, Incarnation

logger = logging.getLogger(__name__)

MAX_CRASHED_AGENTS = 2
"""Agents that one request may crash, and whose circuit breakers may count its failures."""
VERDICT_S = NODE_EXPIRY_S
"""An agent whose pings do not show for so long that it works on does not."""
OUTAGE_S = 2.0
"""Agents that end with their place are lost within this time of the first. Ray's workers, for one, look every
second whether their node lives.
"""


class Loss(NamedTuple):
    """When and where an agent was lost."""

    at: float
    place: Place


class Outage(NamedTuple):
    """Agents that were lost at about the same time, maybe with their place. `at`: when the first was."""

    place: Place
    at: float
    agents: frozenset[Incarnation]


class PlaceState(enum.Enum):
    """Whether a place has outlived an outage, as the pings of its other agents show."""

    ALIVE = enum.auto()
    GONE = enum.auto()
    """It has no other agent that was there before."""
    UNKNOWN = enum.auto()
    """Its other agents have not pinged since."""


class PoisonCheck:
    """Whether one request crashes the agents that serve it; how its legs failed is reported here.

    An agent *crashed* with the request if it fell silent, or if it was lost and its pings do not show that it
    goes on working. Which one of its requests did that cannot be known, so it counts for each of them. A
    request with which `MAX_CRASHED_AGENTS` agents crashed is given to no other.

    Agents that were all that there was on a host, or at one address of it, count as one if they were lost
    within `OUTAGE_S`: then that place died, be it a machine, a Pod or a Ray node. Its agents end one after
    the other, so a request may go from one to the next. Where another agent of the place lives on, each
    counts.

    Circuit breakers count the failures of a request at no more agents than that, and each once per attempt. A
    deadline that passed at an agent with too much to do counts at none.
    """

    def __init__(self, agents: Registry, log: RequestLog, metrics: Metrics) -> None:
        self._agents = agents
        self._log = log
        self._metrics = metrics
        self._failed_now: set[Incarnation] = set()
        """Agents whose circuit breakers have counted a failure of this attempt."""
        self._failed: set[Incarnation] = set()
        self._cancelled: dict[Incarnation, Loss] = {}
        """Agents that were at work on this attempt when it ended."""
        self._lost: dict[Incarnation, Loss] = {}
        """Agents of which it is not known yet whether they work on."""
        self._crashed: dict[Incarnation, Loss] = {}

    def leg_failed(self, agent: Incarnation, error: AgentFailure) -> None:
        """See `LegFailures`."""
        if isinstance(error, AgentLost) and error.may_be_caused and not self._agents.is_leaving(agent):
            losses = self._crashed if error.unresponsive else self._lost
            losses[agent] = self._loss(agent)
        if isinstance(error, AgentTimeout) and self._agents.is_busy(agent):
            return
        if agent in self._failed_now or (
            agent not in self._failed and len(self._failed) >= MAX_CRASHED_AGENTS
        ):
            return
        self._failed_now.add(agent)
        self._failed.add(agent)
        self._agents.leg_failed(agent)

    def leg_cancelled(self, agent: Incarnation) -> None:
        """See `LegFailures`."""
        if not self._agents.is_leaving(agent):
            self._cancelled[agent] = self._loss(agent)

    def attempt_ended(self) -> None:
        """All legs of an attempt have ended, and another one may follow."""
        self._failed_now.clear()
        self._lost |= {agent: loss for agent, loss in self._cancelled.items() if agent not in self._lost}
        self._cancelled.clear()

    async def judge(self, by: float) -> None:
        """Wait, until `by` at the latest, while too many agents may have crashed with the request already.

        Raises `SuspectRequest` if it has.
        """
        known_by = min(by, now() + VERDICT_S)
        by = min(by, known_by + OUTAGE_S)
        while True:
            self._settle()
            lost = self._crashed | self._lost
            places = {outage: self._place_state(outage) for outage in _outages(lost)}
            certain = [outage for outage, state in places.items() if state is PlaceState.GONE]
            possible = [outage for outage, state in places.items() if state is not PlaceState.ALIVE]
            if _count(lost, certain) < MAX_CRASHED_AGENTS:
                return
            until = known_by if _count(lost, possible) >= MAX_CRASHED_AGENTS else by
            if _count(self._crashed, possible) >= MAX_CRASHED_AGENTS or now() >= until:
                self._metrics.suspect_requests.inc()
                logger.warning(
                    "request %s: agents %s were lost while they served it; it is given to no other",
                    self._log.request_id,
                    ", ".join(sorted(lost)),
                    extra=self._log.log_ids(),
                )
                raise SuspectRequest(
                    f"{MAX_CRASHED_AGENTS} agents were lost while they served this request; "
                    "it is given to no other"
                )
            awaited = frozenset(self._lost).union(*map(self._others_at, possible))
            await self._agents.wait_for_ping(awaited, until)

    def _loss(self, agent: Incarnation) -> Loss:
        return Loss(now(), self._agents.place(agent))

    def _settle(self) -> None:
        """Decide, where pings show it, which of the lost agents work on and which crashed."""
        for agent, loss in tuple(self._lost.items()):
            has_served = self._agents.has_served_since(agent, loss.at)
            if has_served is None:
                continue
            del self._lost[agent]
            if not has_served:
                self._crashed[agent] = loss

    def _place_state(self, outage: Outage) -> PlaceState:
        others, over = self._others_at(outage), outage.at + OUTAGE_S
        if any(self._agents.has_served_since(each, over) for each in others):
            return PlaceState.ALIVE
        return PlaceState.UNKNOWN if others else PlaceState.GONE

    def _others_at(self, outage: Outage) -> frozenset[Incarnation]:
        """Return the agents whose pings may show that the place lives on.

        Agents that came later show nothing: they may be there instead of the lost ones.
        """
        return self._agents.agents_at(outage.place, outage.at) - self._crashed.keys() - self._lost.keys()


def _outages(losses: Mapping[Incarnation, Loss]) -> list[Outage]:
    """Return what may have been one outage each, those of whole hosts first. One agent may be in two."""
    by_place: dict[Place, list[tuple[float, Incarnation]]] = {}
    for agent, loss in losses.items():
        if loss.place.host_id:
            for place in {loss.place.host, loss.place}:
                by_place.setdefault(place, []).append((loss.at, agent))
    outages = []
    for place in sorted(by_place, key=lambda place: bool(place.address)):
        left = sorted(by_place[place])
        while left:
            first = left[0][0]
            agents = [agent for at, agent in left if at <= first + OUTAGE_S]
            outages.append(Outage(place, first, frozenset(agents)))
            left = left[len(agents) :]
    return outages


def _count(lost: Iterable[Incarnation], outages: Iterable[Outage]) -> int:
    """Return how many agents count, where those of one outage are one."""
    left, count = set(lost), 0
    for outage in outages:
        if not left.isdisjoint(outage.agents):
            left -= outage.agents
            count += 1
    return count + len(left)
