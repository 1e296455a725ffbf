# SPDX-License-Identifier: Apache-2.0
"""Series of `/metrics` that are computed when asked for: the fleet, what runs at each agent, and the signals
to scale by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.proxy.fleet.fleet import Fleet
from kvferry.proxy.fleet.pairing import Mismatch
from kvferry.proxy.fleet.registry import ROLES
from kvferry.proxy.fleet.snapshot import NodeState, Snapshot, count_incompatible
from kvferry.proxy.telemetry.metrics import MODEL

MAX_LABELLED_AGENTS = 128
"""Agents with series of their own on the metrics page."""


class FleetCollector(Collector):
    """Gauges of the fleet, counted when asked for: they change by the passing of time too.

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

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        nodes = GaugeMetricFamily(
            "kvferry_proxy_nodes", "Registered agents by role and state.", labels=["role", "state"]
        )
        by_state = Counter((node.info.role, node.state) for node in snapshot.nodes)
        for role in ROLES:
            for state in NodeState:
                nodes.add_metric([role, state], by_state[role, state])
        yield nodes
        refused = GaugeMetricFamily(
            "kvferry_proxy_refused_pairings",
            "Pairs of a prefill and a decode agent of one model that cannot serve together, by reason.",
            labels=["reason"],
        )
        by_reason = count_incompatible(snapshot)
        for why in Mismatch:
            refused.add_metric([why.name.lower()], by_reason[why])
        yield refused
        lost = CounterMetricFamily(
            "kvferry_proxy_agents_lost",
            "Agents that disappeared without deregistering, by role.",
            labels=["role"],
        )
        for role in ROLES:
            lost.add_metric([role], self._lost[role])
        yield lost
        yield GaugeMetricFamily(
            "kvferry_proxy_named_servers_down",
            "Servers named with --prefill, --decode or --nodes that are down.",
            len(self._down()),
        )


class AgentCollector(Collector):
    """What this process has at each agent; beyond `MAX_LABELLED_AGENTS` together, as `other`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        in_flight: Counter[str] = Counter()
        legs: Counter[tuple[str, str]] = Counter()
        for position, (info, counts) in enumerate(self._fleet.registry.legs()):
            agent = info.location.partition("//")[2] if position < MAX_LABELLED_AGENTS else "other"
            in_flight[agent] += self._fleet.slots.in_flight(info.incarnation)
            legs[agent, "succeeded"] += counts.succeeded
            legs[agent, "failed"] += counts.failed
        held = GaugeMetricFamily(
            "kvferry_proxy_agent_in_flight",
            "Sequences that this proxy is running at each agent.",
            labels=["agent"],
        )
        for agent, count in in_flight.items():
            held.add_metric([agent], count)
        yield held
        ended = CounterMetricFamily(
            "kvferry_proxy_agent_legs",
            "Finished requests of this proxy to each agent. failed: the agent failed or did not answer in "
            "time. Rejected and cancelled requests are not counted.",
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
            "Seconds that one prefill agent would need for this proxy's prompts that are not computed yet. "
            "Absent until agents have measured how fast they compute prompts.",
            labels=[MODEL],
        )
        pressure = GaugeMetricFamily(
            "kvferry_proxy_decode_pressure",
            "This proxy's sequences, waiting or running, divided by the slots of all decode agents in "
            "rotation. Over 1, some have to wait. Absent while an agent does not report its slots.",
            labels=[MODEL],
        )
        wanted = GaugeMetricFamily(
            "kvferry_proxy_wanted_agents",
            "Number of agents needed for the requests that arrive at this proxy, by role. "
            "Absent until agents have measured how long a request takes.",
            labels=[MODEL, "role"],
        )
        for model, signals in self._fleet.scaling_signals().items():
            if signals.prefill_backlog_s is not None:
                backlog.add_metric([model], signals.prefill_backlog_s)
            if signals.decode_pressure is not None:
                pressure.add_metric([model], signals.decode_pressure)
            for role, number in signals.wanted.items():
                wanted.add_metric([model, role], number)
        return backlog, pressure, wanted
