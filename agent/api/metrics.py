# SPDX-License-Identifier: Apache-2.0
"""The agent's /metrics page (docs/architecture.md#metrics). One registry per agent, none global."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.agent.messages.requests import Stats, Timing

_PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

# Shown from the start: Prometheus cannot see a counter grow that begins to exist with its first count.
_LEASE_CAUSES = ("released", "expired", "dropped", "failed")


class AgentMetrics:
    """Counts finished requests, and shows the engine's last snapshot when scraped.

    Args:
        stats: Returns that snapshot, or None before the first.
    """

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvferry_agent_requests", "Finished requests by HTTP status.", ["status"], registry=self._registry
        )
        self._phases = Histogram(
            "kvferry_agent_phase_seconds",
            "Where the time of a request went, by phase.",
            ["phase"],
            buckets=_PHASE_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_EngineCollector(stats))

    def finished(self, status: int, timing: Timing | None) -> None:
        """Count one finished request, and its phases where the engine reported them."""
        self._requests.labels(status=str(status)).inc()
        if timing is not None:
            for phase, seconds in timing.phases().items():
                self._phases.labels(phase=phase).observe(seconds)

    def render(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's counters at scrape time."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        plane = stats.plane
        yield GaugeMetricFamily(
            "kvferry_agent_num_requests_running", "Sequences in the running batch.", stats.running
        )
        yield GaugeMetricFamily(
            "kvferry_agent_num_requests_waiting", "Requests waiting for room.", stats.waiting
        )
        blocks = GaugeMetricFamily("kvferry_agent_kv_blocks", "KV blocks by state.", labels=["state"])
        for state, count in (
            ("free", stats.blocks_free),
            ("used", stats.blocks_used),
            ("leased", stats.blocks_leased),
            ("quarantined", stats.blocks_quarantined),
        ):
            blocks.add_metric([state], count)
        yield blocks
        for name, text, value in (
            ("agent_steps", "Engine steps.", stats.steps),
            ("agent_num_preemptions", "Sequences that lost their blocks to others.", stats.preemptions),
            (
                "agent_recomputes",
                "Prompts computed here because their KV could not be pulled.",
                stats.recomputes,
            ),
            ("transfer_pulls", "KV pulls that were proven valid.", plane.pulls),
            (
                "transfer_streamed_pulls",
                "KV pulls that had blocks before the prefill had ended.",
                plane.streamed_pulls,
            ),
            ("transfer_bytes", "Bytes of KV pulled.", plane.pull_bytes),
            ("transfer_descriptors", "Descriptors posted for pulls.", plane.pull_descriptors),
            ("transfer_seconds", "Seconds spent pulling.", plane.pull_seconds),
            (
                "transfer_verify_seconds",
                "Seconds spent on checking pulled KV, part of pulling.",
                plane.verify_seconds,
            ),
            ("transfer_rebuilds", "Transfer engines destroyed and opened anew.", plane.rebuilds),
            ("transfer_handshakes", "Handshakes with other agents.", plane.handshakes),
            ("agent_integrity_errors", "Audits of an allocator that failed.", stats.integrity_errors),
        ):
            yield CounterMetricFamily(f"kvferry_{name}", text, value)
        for name, text, label, counts in (
            ("transfer_failures", "Failed KV pulls by reason.", "reason", plane.pull_failures),
            (
                "transfer_leases_ended",
                "Leases that ended, by cause.",
                "cause",
                dict.fromkeys(_LEASE_CAUSES, 0) | plane.leases_ended,
            ),
        ):
            family = CounterMetricFamily(f"kvferry_{name}", text, labels=[label])
            for word, count in counts.items():
                family.add_metric([word], count)
            yield family
