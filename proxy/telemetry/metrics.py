# SPDX-License-Identifier: Apache-2.0
"""The proxy's Prometheus metrics (design §10), in a registry of their own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.proxy.fleet.compatibility import Mismatch, refused_pairs
from kvferry.proxy.fleet.refusals import Refusal
from kvferry.proxy.fleet.registry import NodeState, Snapshot
from kvferry.proxy.telemetry.fast_metrics import Gauges, Histogram, Histograms

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_PHASE_BUCKETS = (0.0005, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOTAL_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Metrics:
    """Everything that is counted. Requests are those of the two completion endpoints."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_requests",
            "Requests by how they ended; 499: the client left.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._ended: dict[tuple[str, int], Counter] = {}
        self.in_flight = Gauges("kvferry_requests_in_flight", "Requests now in each phase.", "phase")
        registry.register(self.in_flight)
        self.ttft = Histogram(
            "kvferry_ttft_seconds",
            "From a streamed request's arrival to its first text.",
            _TTFT_BUCKETS,
        )
        registry.register(self.ttft)
        self.tpot = Histogram(
            "kvferry_tpot_seconds",
            "Mean time per event of a choice after the first, per streamed request.",
            _TOKEN_BUCKETS,
        )
        registry.register(self.tpot)
        self.itl = Histogram(
            "kvferry_itl_seconds",
            "Time between arrivals of events within a stream.",
            _TOKEN_BUCKETS,
        )
        registry.register(self.itl)
        self.e2e = Histogram(
            "kvferry_e2e_seconds",
            "From a request's arrival to the end of its answer.",
            _TOTAL_BUCKETS,
        )
        registry.register(self.e2e)
        self.phases = Histograms(
            "kvferry_phase_seconds",
            "Where requests spend their time.",
            "phase",
            _PHASE_BUCKETS,
        )
        registry.register(self.phases)
        self.retries = Counter(
            "kvferry_retries", "Requests given to another pair, by the leg that was lost.", ["leg"],
            registry=registry,
        )  # fmt: skip
        self.migrations = Counter(
            "kvferry_migrations", "Streams that broke in mid-answer and went on elsewhere.", registry=registry
        )
        self.streamed_pulls = Counter(
            "kvferry_streamed_pulls", "Decode legs that were sent together with their prefill legs.",
            registry=registry,
        )  # fmt: skip
        self.retries_denied = Counter(
            "kvferry_retries_denied", "Retries that the retry budget did not allow.", registry=registry
        )
        self.queue_length = Gauge(
            "kvferry_queue_length", "Requests that wait for an agent with room.", registry=registry
        )
        self.queue_wait = Histogram(
            "kvferry_queue_wait_seconds",
            "How long requests waited for an agent with room, of those that had to.",
            _PHASE_BUCKETS,
        )
        registry.register(self.queue_wait)
        self.rejections = Counter(
            "kvferry_rejections", "Requests refused because all agents were busy.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.drops = Counter(
            "kvferry_drops", "Transfers given up at the prefill agent, by outcome.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.prompts_recomputed = Counter(
            "kvferry_prompts_recomputed",
            "Prompts that another engine's decode server computed again, as its partner handed nothing over.",
            ["dialect"],
            registry=registry,
        )
        self.leases = Counter(
            "kvferry_leases_judged",
            "Decode legs of other engines by what is known of the KV that they read.",
            ["verdict"],
            registry=registry,
        )
        self.bad_pings = Counter(
            "kvferry_bad_pings", "Discovery frames that were dropped.", registry=registry
        )
        self.refused_pings = Counter(
            "kvferry_refused_pings", "Agents' pings that were refused.", ["reason"], registry=registry
        )
        for reason in Refusal:  # so that a first one is seen as an increase
            self.refused_pings.labels(reason.name.lower())

    def watch_fleet(self, snapshot: Callable[[], Snapshot], servers_down: Callable[[], int]) -> None:
        """From now on show the agents of `snapshot()` too, and how many named servers are down. Once."""
        self._registry.register(_Agents(snapshot, servers_down))

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        return self._registry.collect()

    def ended(self, endpoint: str, status: int) -> None:
        """Count a request that has ended."""
        counter = self._ended.get((endpoint, status))
        if counter is None:  # looking a label up costs more than counting
            counter = self._ended[endpoint, status] = self.requests.labels(endpoint, str(status))
        counter.inc()

    def requests_in_flight(self) -> dict[str, int]:
        """Requests now in each phase that any request has been in."""
        return self.in_flight.counts()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Agents(Collector):
    """Agents and refused pairings, counted when asked: they change by the passing of time too."""

    def __init__(self, snapshot: Callable[[], Snapshot], servers_down: Callable[[], int]) -> None:
        self._snapshot = snapshot
        self._servers_down = servers_down

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        nodes = GaugeMetricFamily("kvferry_nodes", "Agents by role and state.", labels=["role", "state"])
        tally = Tally((node.info.role, node.state) for node in snapshot.nodes)
        for role in ("prefill", "decode", "both"):
            for state in NodeState:
                nodes.add_metric([role, state], tally[role, state])
        yield nodes
        refused = GaugeMetricFamily(
            "kvferry_refused_pairings", "Pairs of agents that cannot serve together.", labels=["reason"]
        )
        reasons = Tally(pair.why for pair in refused_pairs(snapshot))
        for reason in Mismatch:
            refused.add_metric([reason], reasons[reason])
        yield refused
        yield GaugeMetricFamily(
            "kvferry_named_servers_down",
            "Servers named by flags or a file that are down.",
            self._servers_down(),
        )
