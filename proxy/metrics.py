# SPDX-License-Identifier: Apache-2.0
"""The proxy's Prometheus metrics (design §10), in a registry of their own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.pairing import Mismatch, refused_pairs
from proxy.refusals import Refusal
from proxy.registry import NodeState, Snapshot

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
        self.in_flight = Gauge(
            "kvferry_requests_in_flight", "Requests now in each phase.", ["phase"], registry=registry
        )
        self.ttft = Histogram(
            "kvferry_ttft_seconds",
            "From a streamed request's arrival to its first text.",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.tpot = Histogram(
            "kvferry_tpot_seconds",
            "Mean time per event of a choice after the first, per streamed request.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.itl = Histogram(
            "kvferry_itl_seconds",
            "Time between arrivals of events within a stream.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.e2e = Histogram(
            "kvferry_e2e_seconds",
            "From a request's arrival to the end of its answer.",
            buckets=_TOTAL_BUCKETS,
            registry=registry,
        )
        self.phases = Histogram(
            "kvferry_phase_seconds",
            "Where requests spend their time.",
            ["phase"],
            buckets=_PHASE_BUCKETS,
            registry=registry,
        )
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
            buckets=_PHASE_BUCKETS,
            registry=registry,
        )
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

    def watch_fleet(self, snapshot: Callable[[], Snapshot]) -> None:
        """From now on show the agents of `snapshot()` too. Once."""
        self._registry.register(_Agents(snapshot))

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        return self._registry.collect()

    def requests_in_flight(self) -> dict[str, int]:
        """Requests now in each phase that any request has been in."""
        samples = (sample for family in self.in_flight.collect() for sample in family.samples)
        return {sample.labels["phase"]: int(sample.value) for sample in samples}

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Agents(Collector):
    """Agents and refused pairings, counted when asked: they change by the passing of time too."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

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
