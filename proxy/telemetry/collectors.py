# SPDX-License-Identifier: Apache-2.0
"""Series of `/metrics` that are computed when asked for: the fleet, what runs at each agent, and the signals
to scale by.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.proxy.fleet.fleet import Fleet
from kvferry.proxy.fleet.pairing import Mismatch, reason
from kvferry.proxy.fleet.registry import ROLES
from kvferry.proxy.fleet.snapshot import (
    MAX_PAIRINGS,
    NodeState,
    Snapshot,
    count_incompatible,
    incompatible_pairs,
)

logger = logging.getLogger(__name__)

MAX_LABELLED_AGENTS = 128
"""Agents with series of their own on the metrics page."""


class FleetCollector(Collector):
    """Gauges of the fleet, counted when asked for: they change by the passing of time too.

    The labels are words; the log has the sentence that belongs to a refused pairing, when it is first seen.

    Args:
        lost: How many agents of each role were lost, kept up to date.
        down: Returns the servers named by flags or a file that are down.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        lost: Mapping[str, int],
        down: Callable[[], Collection[object]],
    ) -> None:
        self._snapshot = snapshot
        self._lost = lost
        self._down = down
        self._logged: set[Mismatch] = set()

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        nodes = GaugeMetricFamily(
            "kvferry_proxy_nodes", "Agents by role and state.", labels=["role", "state"]
        )
        by_state = Counter((node.info.role, node.state) for node in snapshot.nodes)
        for role in ROLES:
            for state in NodeState:
                nodes.add_metric([role, state], by_state[role, state])
        yield nodes
        refused = GaugeMetricFamily(
            "kvferry_proxy_refused_pairings", "Pairs of agents that cannot serve together.", labels=["reason"]
        )
        by_reason = count_incompatible(snapshot)
        for why in Mismatch:
            refused.add_metric([why.name.lower()], by_reason[why])
        self._log_refused(snapshot, {why for why in Mismatch if by_reason[why]})
        yield refused
        lost = CounterMetricFamily(
            "kvferry_proxy_agents_lost",
            "Agents that went without a word of it, killed or cut off, by role.",
            labels=["role"],
        )
        for role in ROLES:
            lost.add_metric([role], self._lost[role])
        yield lost
        yield GaugeMetricFamily(
            "kvferry_proxy_named_servers_down",
            "Servers named by flags or a file that are down.",
            len(self._down()),
        )

    def _log_refused(self, snapshot: Snapshot, reasons: set[Mismatch]) -> None:
        """Log an example of each reason that was not there when last asked."""
        new, self._logged = reasons - self._logged, reasons
        if not new:
            return
        for prefill, decode, why in islice(incompatible_pairs(snapshot), MAX_PAIRINGS):
            if why in new:
                new.remove(why)
                logger.warning(
                    "agents %s and %s cannot serve together: %s",
                    prefill.address,
                    decode.address,
                    reason(prefill, decode, why),
                )


class AgentCollector(Collector):
    """What this process has at each agent; beyond `MAX_LABELLED_AGENTS` together, as `other`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        in_flight: Counter[str] = Counter()
        legs: Counter[tuple[str, str]] = Counter()
        for position, (info, counts) in enumerate(self._fleet.registry.legs()):
            agent = urlsplit(info.address).netloc if position < MAX_LABELLED_AGENTS else "other"
            in_flight[agent] += self._fleet.slots.in_flight(info.incarnation)
            legs[agent, "succeeded"] += counts.succeeded
            legs[agent, "failed"] += counts.failed
        held = GaugeMetricFamily(
            "kvferry_proxy_agent_in_flight", "Sequences of this proxy at each agent.", labels=["agent"]
        )
        for agent, count in in_flight.items():
            held.add_metric([agent], count)
        yield held
        ended = CounterMetricFamily(
            "kvferry_proxy_agent_legs",
            "Legs at each agent by how they ended: succeeded as they should, failed by the agent's fault.",
            labels=["agent", "outcome"],
        )
        for labels, count in legs.items():
            ended.add_metric(labels, count)
        yield ended


class ScalingCollector(Collector):
    """This process's part of the signals to scale by (`proxy.fleet.scaling`), where they are known."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        backlog = GaugeMetricFamily(
            "kvferry_proxy_prefill_backlog_seconds",
            "Seconds of one prefill agent's work in this proxy's prompts that are not computed yet, waiting "
            "or sent. Absent until agents have measured what a prompt takes.",
            labels=["model"],
        )
        pressure = GaugeMetricFamily(
            "kvferry_proxy_decode_pressure",
            "This proxy's sequences, waiting or sent, over the slots of all decode agents in rotation. "
            "Absent while an agent does not say how many it has.",
            labels=["model"],
        )
        wanted = GaugeMetricFamily(
            "kvferry_proxy_wanted_agents",
            "Agents that the requests which arrive at this proxy would keep busy all the time, by role. "
            "Absent until agents have measured what a request takes.",
            labels=["model", "role"],
        )
        for model, signals in self._fleet.scaling_signals().items():
            if signals.prefill_backlog_s is not None:
                backlog.add_metric([model], signals.prefill_backlog_s)
            if signals.decode_pressure is not None:
                pressure.add_metric([model], signals.decode_pressure)
            for role, number in signals.wanted.items():
                wanted.add_metric([model, role], number)
        return backlog, pressure, wanted
