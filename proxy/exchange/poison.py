# SPDX-License-Identifier: Apache-2.0
"""Whether it is the request that brings agents down."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from kvferry.proxy.clock import now
from kvferry.proxy.errors import AgentLost, AgentTimeout, SuspectRequest
from kvferry.proxy.exchange.legs import AgentFailure
from kvferry.proxy.exchange.request_log import RequestLog
from kvferry.proxy.fleet.registry import Place
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import NODE_EXPIRY_S, Incarnation

logger = logging.getLogger(__name__)

MAX_FELLED = 2
"""Agents that one request may bring down, and whose circuit breakers may count its failures."""
VERDICT_S = NODE_EXPIRY_S
"""An agent whose pings do not show for so long that it works on does not."""
OUTAGE_S = 2.0
"""Agents that end with their place are lost within this time of the first. Ray's workers, for one, look every
second whether their node lives.
"""


class AgentStates(Protocol):
    """What is known of agents, and their circuit breakers (`Fleet`)."""

    def leg_succeeded(self, agent: Incarnation, /) -> None: ...
    def leg_failed(self, agent: Incarnation, /) -> None: ...
    def is_busy(self, agent: Incarnation, /) -> bool: ...
    def is_leaving(self, agent: Incarnation, /) -> bool: ...
    def has_served_since(self, agent: Incarnation, at: float, /) -> bool | None: ...
    def place(self, agent: Incarnation, /) -> Place: ...
    def agents_at(self, place: Place, joined_by: float, /) -> frozenset[Incarnation]: ...
    async def wait_for_word(self, agents: Collection[Incarnation], by: float, /) -> None: ...


class Loss(NamedTuple):
    """When and where an agent was lost."""

    at: float
    place: Place


class Outage(NamedTuple):
    """Agents that were lost at about the same time, maybe with their place. `at`: when the first was."""

    place: Place
    at: float
    agents: frozenset[Incarnation]


class Suspicion:
    """Whether one request brings down the agents that serve it; the ends of its legs are reported here.

    An agent was *felled* with the request if it fell silent, or if it was lost and its pings do not show that
    it goes on working. Which one of its requests did that cannot be known, so it counts for each of them.
    A request that has felled `MAX_FELLED` agents is given to no other.

    Agents that were all that there was on a host, or at one address of it, count as one if they were lost
    within `OUTAGE_S`: then that place died, be it a machine, a Pod or a Ray node. Its agents end one after
    the other, so a request may go from one to the next. Where another agent of the place lives on, each
    counts.

    Circuit breakers count the failures of a request at no more agents than that, and each once per attempt. A
    deadline that passed at an agent with too much to do counts at none.
    """

    def __init__(self, agents: AgentStates, log: RequestLog, metrics: Metrics) -> None:
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
        self._felled: dict[Incarnation, Loss] = {}

    def leg_succeeded(self, agent: Incarnation) -> None:
        """See `LegReports`."""
        self._agents.leg_succeeded(agent)

    def leg_failed(self, agent: Incarnation, error: AgentFailure) -> None:
        """See `LegReports`."""
        if isinstance(error, AgentLost) and error.may_be_caused and not self._agents.is_leaving(agent):
            losses = self._felled if error.unresponsive else self._lost
            losses[agent] = self._loss(agent)
        if isinstance(error, AgentTimeout) and self._agents.is_busy(agent):
            return
        if agent in self._failed_now or (agent not in self._failed and len(self._failed) >= MAX_FELLED):
            return
        self._failed_now.add(agent)
        self._failed.add(agent)
        self._agents.leg_failed(agent)

    def leg_cancelled(self, agent: Incarnation) -> None:
        """See `LegReports`."""
        if not self._agents.is_leaving(agent):
            self._cancelled[agent] = self._loss(agent)

    def attempt_ended(self) -> None:
        """All legs of an attempt have ended, and another one may follow."""
        self._failed_now.clear()
        self._lost |= {agent: loss for agent, loss in self._cancelled.items() if agent not in self._lost}
        self._cancelled.clear()

    async def judge(self, by: float) -> None:
        """Wait, until `by` at the latest, while the request may have felled too many agents already.

        Raises `SuspectRequest` if it has.
        """
        known_by = min(by, now() + VERDICT_S)
        by = min(by, known_by + OUTAGE_S)
        while True:
            self._settle()
            lost = self._felled | self._lost
            witnesses = {outage: self._witnesses(outage) for outage in _outages(lost)}
            certain = [outage for outage, left in witnesses.items() if left == frozenset()]
            possible = [outage for outage, left in witnesses.items() if left is not None]
            if _count(lost, certain) < MAX_FELLED:
                return
            until = known_by if _count(lost, possible) >= MAX_FELLED else by
            if _count(self._felled, possible) >= MAX_FELLED or now() >= until:
                self._metrics.suspect_requests.inc()
                logger.warning(
                    "request %s: agents %s were lost while they served it; it is given to no other",
                    self._log.request_id,
                    ", ".join(sorted(lost)),
                    extra=self._log.log_ids(),
                )
                raise SuspectRequest(
                    f"{MAX_FELLED} agents were lost while they served this request; it is given to no other"
                )
            awaited = frozenset(self._lost).union(*(left for left in witnesses.values() if left))
            await self._agents.wait_for_word(awaited, until)

    def _loss(self, agent: Incarnation) -> Loss:
        return Loss(now(), self._agents.place(agent))

    def _settle(self) -> None:
        """Decide, where pings show it, which of the lost agents work on and which were felled."""
        for agent, loss in tuple(self._lost.items()):
            has_served = self._agents.has_served_since(agent, loss.at)
            if has_served is None:
                continue
            del self._lost[agent]
            if not has_served:
                self._felled[agent] = loss

    def _witnesses(self, outage: Outage) -> frozenset[Incarnation] | None:
        """Return the agents that may yet show that the place lives on, none if it is gone; None if one has.

        Agents that came later show nothing: they may be there instead of the lost ones.
        """
        others = self._agents.agents_at(outage.place, outage.at) - self._felled.keys() - self._lost.keys()
        over = outage.at + OUTAGE_S
        return None if any(self._agents.has_served_since(each, over) for each in others) else others


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
