# SPDX-License-Identifier: Apache-2.0
"""The truth about the fleet: what agents have said, what they were given, and who is let in next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.discovery.health_monitor import HealthMonitor
from kvferry.proxy.errors import NotFound
from kvferry.proxy.fleet.address_rules import AddressRules
from kvferry.proxy.fleet.admission import Admission, Reservation
from kvferry.proxy.fleet.circuit_breaker import BreakerSettings
from kvferry.proxy.fleet.compatibility import alike
from kvferry.proxy.fleet.interface import AcquireRequest, Page, PageName
from kvferry.proxy.fleet.load import Loads
from kvferry.proxy.fleet.overview import overview
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.fleet.router import NoPair, Pair, Router, make_policy
from kvferry.proxy.fleet.slots import Slots
from kvferry.proxy.fleet.views import models_page, nodes_page, readiness, scrape_targets
from kvferry.proxy.telemetry import metrics as metrics_page
from kvferry.proxy.telemetry.history import History
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Incarnation, Register


class LocalFleet:
    """Registry, router and door of one proxy, in this process (`fleet.Fleet`).

    Args:
        clock: Monotonic seconds: the event loop's clock.
    """

    def __init__(
        self, config: ProxyConfig, metrics: Metrics, history: History, clock: Callable[[], float]
    ) -> None:
        self.slots = Slots()
        breakers = BreakerSettings(failures=config.breaker_failures, pause_s=config.breaker_pause_s)
        rules = AddressRules(config.allow_address, tls_only=config.agent_ca is not None)
        self.registry = Registry(self.slots.in_flight, breakers, rules)
        self.router = _router(config, self.slots)
        self.admission = Admission(self.slots, metrics, config.queue_limit)
        self.metrics = metrics
        self.history = history
        self.clock = clock
        self.watches: tuple[HealthMonitor, ...] = ()
        """Of the servers that do not announce themselves; those that are down are shown with the reason."""
        metrics.watch_fleet(lambda: self.registry.snapshot(clock()), lambda: len(self._down()))

    async def enter(self, call: AcquireRequest) -> Reservation | NoPair:
        """See `Fleet`."""
        return await self.admission.enter(
            call.ask, lambda: self._route(call), by=call.by, first=bool(call.exclude)
        )

    def connection_refused(self, agent: Incarnation) -> None:
        """See `Fleet`."""
        self.registry.connection_refused(agent, self.clock())

    def leg_succeeded(self, agent: Incarnation) -> None:
        """See `Fleet`."""
        self.registry.leg_succeeded(agent)

    def leg_failed(self, agent: Incarnation) -> None:
        """See `Fleet`."""
        self.registry.leg_failed(agent, self.clock())

    async def find_lost(self, agents: Sequence[Register]) -> frozenset[Incarnation]:
        """See `Fleet`."""
        registry, now = self.registry, self.clock()
        return frozenset(
            incarnation
            for info in agents
            if not registry.works(incarnation := Incarnation(info.incarnation), now)
            and registry.has_substitute(info, now)
        )

    async def page(self, name: PageName) -> Page:
        """See `Fleet`."""
        now = self.clock()
        snapshot = self.registry.snapshot(now)
        match name:
            case "models":
                return as_json(models_page(snapshot))
            case "ready":
                report = readiness(snapshot)
                return as_json(report, 200 if report["ready"] else 503)
            case "nodes":
                return as_json(nodes_page(snapshot, self.slots, now) | {"down": self._down()})
            case "targets":
                return as_json(scrape_targets(snapshot))
            case "metrics":
                return Page(body=self.metrics.exposition(), content_type=metrics_page.CONTENT_TYPE)
            case "live":
                in_flight = self.metrics.requests_in_flight()
                return as_json(overview(snapshot, self.slots, in_flight, self.history, now))

    async def drain(self, agent: Incarnation, drained: bool) -> Page:
        """See `Fleet`."""
        if not self.registry.drain(agent, drained):
            error = NotFound(404, f"no agent has the incarnation {agent!r}")
            return Page(status=error.status, body=error.body())
        self.admission.pump()
        now = self.clock()
        page = nodes_page(self.registry.snapshot(now), self.slots, now)
        return as_json(next(node for node in page["nodes"] if node["incarnation"] == agent))

    def _down(self) -> list[dict[str, str]]:
        return [
            {"address": watch.server.address, "role": watch.server.role, "reason": watch.why_down}
            for watch in self.watches
            if watch.why_down is not None
        ]

    def _route(self, call: AcquireRequest) -> Pair | NoPair:
        """Which pair may have the request now."""
        now = self.clock()
        snapshot = self.registry.snapshot(now)
        if call.must_match is not None:
            snapshot = alike(snapshot, call.must_match)
        # An agent alone would begin again with token 1, which the client may have by now.
        pair = self.router.choose(snapshot, call.ask, call.exclude, apart=call.must_match is not None)
        if isinstance(pair, Pair):
            self.registry.sent((node.incarnation for node in pair.nodes), now)
        return pair


def _router(config: ProxyConfig, slots: Slots) -> Router:
    rng = Random()
    return Router(
        make_policy(config.prefill_policy, rng),
        make_policy(config.decode_policy, rng),
        Loads(slots, {"prefill": config.prefill_limit, "decode": config.decode_limit}),
        config.split_min_tokens,
        config.stream_pull_min_tokens,
    )


def as_json(value: Any, status: int = 200) -> Page:
    """A page that is a JSON document."""
    return Page(status=status, body=msgspec.json.encode(value))
