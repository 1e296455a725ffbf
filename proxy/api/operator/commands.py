# SPDX-License-Identifier: Apache-2.0
"""What an operator, or a client that asks about the fleet, may ask of a proxy: its pages and its commands.

The pages of a large fleet are shown again for a second (`PageCache`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from kvferry.proxy.api.operator.pages import (
    Activity,
    FleetView,
    Page,
    ProxyFacts,
    agent_page,
    dashboard_page,
    drain_page,
    fleet_page,
    node_page,
    role_page,
    timeline_page,
)
from kvferry.proxy.fleet.fleet import Fleet
from kvferry.proxy.telemetry.agent_reports import AgentReports
from kvferry.proxy.telemetry.history import FailureLog, History
from kvferry.proxy.telemetry.metrics import CONTENT_TYPE, Metrics
from kvferry.proxy.telemetry.request_log import Timelines
from kvferry.proxy.wire.registration import Incarnation, Role

LARGE_FLEET = 64
"""Agents from which on a page is shown again."""
PAGE_AGE_S = 1.0
"""How old such a page may be."""

PageName = Literal["models", "ready", "nodes", "targets", "metrics", "dashboard"]


class PageCache:
    """The last version of each page, shown again while a new one is made and, of a large fleet, soon after.

    Args:
        clock: The event loop's clock.
        make: Makes a page, of a model or of all.
        num_agents: How large the fleet is.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        make: Callable[[PageName, str], Awaitable[Page]],
        num_agents: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._make = make
        self._num_agents = num_agents
        self._locks: dict[str, asyncio.Lock] = {}
        self._pages: dict[str, tuple[Page, float]] = {}
        """With the time at which it was begun."""

    async def get(self, name: PageName, model: str) -> Page:
        """Return the page that `make` makes, or of all models has made lately. Raises what it raises."""
        if model:
            return await self._make(name, model)
        oldest = self._clock() - (PAGE_AGE_S if self._num_agents() > LARGE_FLEET else 0.0)
        async with self._locks.setdefault(name, asyncio.Lock()):
            last = self._pages.get(name)
            if last is not None and last[1] >= oldest:
                return last[0]
            begun = self._clock()
            page = await self._make(name, "")
            self._pages[name] = (page, begun)
            return page

    def clear(self) -> None:
        """Show no page again that shows the fleet as it was."""
        self._pages.clear()


class OperatorApi:
    """The pages of a proxy of one process, and the operator's commands to it."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        history: History,
        failures: FailureLog,
        timelines: Timelines,
        agents: AgentReports,
        down: Callable[[], Sequence[Mapping[str, object]]],
        facts: Callable[[], ProxyFacts] = ProxyFacts,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._history = history
        self._failures = failures
        self._timelines = timelines
        self._agents = agents
        self._down = down
        self._facts = facts
        self._pages = PageCache(fleet.clock, self._make, lambda: fleet.registry.num_agents)

    async def page(self, name: PageName, model: str = "") -> Page:
        """Return one page; of the dashboard, if `model` is given, what concerns that model.

        Raises `ProxyError` when it cannot be put together.
        """
        return await self._pages.get(name, model)

    async def _make(self, name: PageName, model: str = "") -> Page:
        view = self.view()
        if name == "metrics":
            return Page(body=self._metrics.exposition(), content_type=CONTENT_TYPE)
        if name == "dashboard":
            activity = Activity(
                in_flight=self._metrics.requests_in_flight(),
                history=self._history,
                failures=self._failures.latest(),
                agents=self._agents,
                proxy=self._facts(),
            )
            return await dashboard_page(view, activity, model)
        return await fleet_page(name, view)

    async def agent(self, agent: Incarnation) -> Page:
        """Return what is known of one agent, its last hour included, or a 404. Raises `ProxyError`."""
        return agent_page(self.view(), agent, self._agents)

    async def timeline(self, request_id: str) -> Page:
        """Return the way of one of the latest requests, or a 404. Raises `ProxyError`."""
        return timeline_page(request_id, self.own_timeline(request_id))

    def own_timeline(self, request_id: str) -> dict[str, Any] | None:
        """Return the way of a request that this process has served lately."""
        timeline = self._timelines.find(request_id)
        return None if timeline is None else timeline.page()

    async def cordon(self, agent: Incarnation, cordoned: bool) -> Page:
        """Take an agent out of rotation, or put it back; the page is its entry in `/nodes`, or a 404.

        Raises `ProxyError` when that cannot be done.
        """
        self._fleet.cordon(agent, cordoned)
        self._pages.clear()
        return node_page(self.view(), agent)

    async def pin_role(self, agent: Incarnation, role: Role) -> Page:
        """Use an agent for one role, or for both again.

        The page is its entry in `/nodes`, a 404, or a 409 if it keeps its role.

        Raises `ProxyError` when that cannot be done.
        """
        pinned = self._fleet.pin_role(agent, role)
        self._pages.clear()
        return role_page(pinned, self.view(), agent)

    async def drain(self, agent: Incarnation) -> Page:
        """Ask an agent to drain.

        The page is its entry in `/nodes`, a 404, or a 409 if it cannot be asked.

        Raises `ProxyError` when that cannot be done.
        """
        asked = self._fleet.drain(agent)
        self._pages.clear()
        return drain_page(asked, self.view(), agent)

    def view(self) -> FleetView:
        """Return the fleet as it is now."""
        fleet, now = self._fleet, self._fleet.clock()
        return FleetView(
            snapshot=fleet.registry.snapshot(),
            not_served=fleet.settings.not_served,
            in_flight=fleet.slots.in_flight,
            down=self._down(),
            rejected=fleet.registry.rejected_agents(),
            events=lambda: fleet.registry.events,
            now=now,
        )
