# SPDX-License-Identifier: Apache-2.0
"""Whether a request may be tried again: its own limits, what retries may add to everybody's load, and whether
it is the request that brings agents down.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from kvferry.proxy.clock import now
from kvferry.proxy.errors import AgentLost, AgentTimeout, StreamBroken, SuspectRequest
from kvferry.proxy.exchange.legs import AgentFailure
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import NODE_EXPIRY_S, Incarnation

logger = logging.getLogger(__name__)

MAX_FELLED = 2
"""Agents that one request may bring down, and whose circuit breakers may count its failures."""
VERDICT_S = NODE_EXPIRY_S
"""An agent whose pings do not show for so long that it works on does not."""
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


class AgentStates(Protocol):
    """What is known of agents, and their circuit breakers (`Fleet`)."""

    def leg_succeeded(self, agent: Incarnation, /) -> None: ...
    def leg_failed(self, agent: Incarnation, /) -> None: ...
    def is_busy(self, agent: Incarnation, /) -> bool: ...
    def is_leaving(self, agent: Incarnation, /) -> bool: ...
    def has_served_since(self, agent: Incarnation, at: float, /) -> bool | None: ...
    def host_id(self, agent: Incarnation, /) -> str: ...
    def agents_on(self, host_id: str, /) -> frozenset[Incarnation]: ...
    async def wait_for_word(self, agents: Collection[Incarnation], by: float, /) -> None: ...


class Place(NamedTuple):
    """Where and with which attempt of the request an agent was lost. `host_id`: empty if unknown."""

    host_id: str
    attempt: int


class Loss(NamedTuple):
    """When and where an agent was lost."""

    at: float
    place: Place


class Suspicion:
    """Whether one request brings down the agents that serve it; the ends of its legs are reported here.

    An agent was *felled* with the request if it fell silent, or if it was lost and its pings do not show that
    it goes on working. Which one of its requests did that cannot be known, so it counts for each of them.
    A request that has felled `MAX_FELLED` agents is given to no other. The agents of one attempt count as one
    where they were all that there was on their host: then the host died.

    Circuit breakers count the failures of a request at no more agents than that, and each once per attempt. A
    deadline that passed at an agent with too much to do counts at none.
    """

    def __init__(self, agents: AgentStates, log: RequestLog, metrics: Metrics) -> None:
        self._agents = agents
        self._log = log
        self._metrics = metrics
        self._attempt = 0
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
        self._attempt += 1
        self._failed_now.clear()
        self._lost |= {agent: loss for agent, loss in self._cancelled.items() if agent not in self._lost}
        self._cancelled.clear()

    async def judge(self, by: float) -> None:
        """Wait, until `by` at the latest, while the request may have felled too many agents already.

        Raises `SuspectRequest` if it has.
        """
        by = min(by, now() + VERDICT_S)
        while True:
            self._settle()
            lost = self._felled | self._lost
            hosts = {loss.place: self._awaited_of(loss) for loss in lost.values()}
            alive = {place for place, awaited in hosts.items() if awaited is None}
            gone = {place for place, awaited in hosts.items() if awaited == frozenset()}
            if _count(lost, gone) < MAX_FELLED:
                return
            if _count(self._felled, hosts.keys() - alive) >= MAX_FELLED or now() >= by:
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
            awaited = (each for each in hosts.values() if each)
            await self._agents.wait_for_word(frozenset(self._lost).union(*awaited), by)

    def _loss(self, agent: Incarnation) -> Loss:
        return Loss(now(), Place(self._agents.host_id(agent), self._attempt))

    def _settle(self) -> None:
        """Decide, where pings show it, which of the lost agents work on and which were felled."""
        for agent, loss in tuple(self._lost.items()):
            has_served = self._agents.has_served_since(agent, loss.at)
            if has_served is None:
                continue
            del self._lost[agent]
            if not has_served:
                self._felled[agent] = loss

    def _awaited_of(self, loss: Loss) -> frozenset[Incarnation] | None:
        """Return the agents that may show that the host of the loss lives on; None if one has, or the host is
        unknown. None of them: the host is gone.
        """
        if not loss.place.host_id:
            return None
        others = self._agents.agents_on(loss.place.host_id) - self._felled.keys() - self._lost.keys()
        if any(self._agents.has_served_since(each, loss.at) for each in others):
            return None
        return others


def _count(lost: Mapping[Incarnation, Loss], gone: Collection[Place]) -> int:
    """Return how many agents count, where those of one attempt on a host that is gone are one."""
    return len({loss.place if loss.place in gone else agent for agent, loss in lost.items()})
