# SPDX-License-Identifier: Apache-2.0
"""What a request's task asks of the fleet, wherever the truth about it is kept.

A proxy of one process keeps it here (`local_fleet`). With `--workers`, one process keeps it for all
(`hub`), and what a worker calls is a client of that one (`remote_fleet`). An exchange cannot tell which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.router import NOBODY, NoPair
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.wire.messages import Incarnation, Register

JSON = "application/json"

PageName = Literal["models", "ready", "nodes", "targets", "metrics", "live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRequest:
    """One attempt's wish for a pair of agents.

    Args:
        by: When to give up waiting for one, on the event loop's clock.
        avoid: Agents that have just failed this request; not empty for a retry, which goes before others.
        begun_by: An agent from which the client has tokens: others must go on with that very answer.
    """

    ask: RoutingRequest
    by: float
    exclude: frozenset[Incarnation] = NOBODY
    must_match: Register | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """An answer about the fleet as it goes to whoever asked over HTTP."""

    body: bytes
    status: int = 200
    content_type: str = JSON


class Fleet(Protocol):
    """The agents of all of a proxy's workers, and who may go to which."""

    async def enter(self, call: AcquireRequest) -> Reservation | NoPair:
        """Wait for a pair with room and take its slots, or say why there is none to wait for.

        Raises `Overloaded` when too many wait or it waited too long, and `NoAgent` when nobody can tell.
        """

    def connection_refused(self, agent: Incarnation) -> None:
        """A connection to the agent was refused."""

    def leg_succeeded(self, agent: Incarnation) -> None:
        """The agent did what a leg asked of it."""

    def leg_failed(self, agent: Incarnation) -> None:
        """The agent was lost, or silent for too long, or answered nonsense."""

    async def find_lost(self, agents: Sequence[Register]) -> frozenset[Incarnation]:
        """Which of them work no more, while others could do what they did. Raises `NoAgent` when nobody can
        tell.
        """

    async def page(self, name: PageName) -> Page:
        """One of the pages about the fleet. Raises `NoAgent` when nobody can tell."""

    async def drain(self, agent: Incarnation, drained: bool) -> Page:
        """Take an agent out of rotation, or put it back. The page is how it now stands, or a 404."""
