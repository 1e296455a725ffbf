# SPDX-License-Identifier: Apache-2.0
"""The agent's /metrics page (docs/reference/metrics.md). One registry per agent, none global.

Names are vLLM's where they mean the same. Everything that may be counted is shown from the start: Prometheus
cannot see a series grow that begins to exist with its first count.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.agent.messages.requests import Stats, Timing
from kvferry.proxy.wire.registration import Capacity
from kvferry.transfer.events import PULL_FAILURE_REASONS, PULL_SECONDS_BOUNDS, PullTimes

_PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_STATUSES = (200, 400, 404, 413, 499, 500, 503)
_PHASES = ("queue", "prefix_pull", "prefill", "pull_wait", "pull", "pull_tail", "decode_queue", "first_step")
_FINISH_REASONS = ("stop", "length", "abort", "error")
_LEASE_CAUSES = ("released", "expired", "dropped", "withdrawn")
_PROMPT_SOURCES = ("computed", "cached", "pulled", "pulled_prefix")


class AgentMetrics:
    """Counts requests, prompts and tokens, and shows the engine's last snapshot when scraped.

    Args:
        stats: Returns that snapshot, or None before the first.
        backends: Returns the transfer backends that work here, as far as they are known yet.
    """

    def __init__(
        self, stats: Callable[[], Stats | None], backends: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self.generation_tokens = 0
        """Tokens sampled here; counted with every one, so a plain number."""
        self.registry = registry = CollectorRegistry()
        info = Gauge(
            "kvferry_agent_build_info", "1; what runs, in its labels.", ["version", "python"],
            registry=registry,
        )  # fmt: skip
        info.labels(version("kvferry"), platform.python_version()).set(1)
        self._requests = Counter(
            "kvferry_agent_requests",
            "Finished requests by HTTP status. A client's request is one at the prefill agent and one at the "
            "decode agent; 499: the client, or the proxy, left.",
            ["status"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "kvferry_agent_prompt_tokens",
            "Tokens of prompts whose KV was made here: computed, or found in the prefix cache. A decode leg "
            "counts none.",
            registry=registry,
        )
        self._cached_tokens = Counter(
            "kvferry_agent_prompt_tokens_cached",
            "Those of kvferry_agent_prompt_tokens_total that were found in the prefix cache.",
            registry=registry,
        )
        self._choices = Counter(
            "kvferry_agent_request_success",
            "Choices that ended at this agent. abort: the client, or the proxy, left; error: they failed.",
            ["finished_reason"],
            registry=registry,
        )
        self._prompt_length = Histogram(
            "kvferry_agent_request_prompt_tokens",
            "Tokens of a prompt, of the prompts of kvferry_agent_prompt_tokens_total.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.answer_tokens = Histogram(
            "kvferry_agent_request_generation_tokens",
            "Tokens of an answer, all choices together and all legs, where it ended.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._queue_time = Histogram(
            "kvferry_agent_request_queue_time_seconds",
            "How long a leg waited for its first step, or for room to pull into.",
            buckets=_PHASE_BUCKETS_S,
            registry=registry,
        )
        self._phases = Histogram(
            "kvferry_agent_phase_seconds",
            "Where the time of a leg went, by phase; only phases that the leg had.",
            ["phase"],
            buckets=_PHASE_BUCKETS_S,
            registry=registry,
        )
        for status in _STATUSES:
            self._requests.labels(status=str(status))
        for phase in _PHASES:
            self._phases.labels(phase=phase)
        for reason in _FINISH_REASONS:
            self._choices.labels(reason)
        registry.register(_TokenCollector(self))
        registry.register(_EngineCollector(stats, backends))
        ProcessCollector(registry=registry)

    def prompt_done(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt whose KV was made here."""
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)
        self._prompt_length.observe(num_tokens)

    def choices_ended(self, reason: str, count: int) -> None:
        """Count choices that have ended, for one of `_FINISH_REASONS`."""
        self._choices.labels(reason).inc(count)

    def finished(self, status: int, timing: Timing | None) -> None:
        """Count one finished request, and its phases where the engine reported them."""
        self._requests.labels(status=str(status)).inc()
        if timing is not None:
            self._queue_time.observe(timing.queue_s)
            for phase, seconds in timing.phases().items():
                self._phases.labels(phase=phase).observe(seconds)

    def render(self) -> bytes:
        """The page, in Prometheus's text format."""
        return generate_latest(self.registry)


class _TokenCollector(Collector):
    """Reads what is counted as a plain number."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "kvferry_agent_generation_tokens",
            "Tokens sampled here, token 1 of an answer by the prefill agent; the sum over agents is what "
            "clients got, and what was lost with agents.",
            self._metrics.generation_tokens,
        )


def _capacity_metrics(capacity: Capacity) -> Iterator[Metric]:
    """Yield what the engine has measured of itself; of gauges only those that it knows yet."""
    yield CounterMetricFamily(
        "kvferry_agent_prefill_seconds", "Seconds of steps that went into prompts.", capacity.prefill_s
    )
    yield GaugeMetricFamily(
        "kvferry_agent_decode_slots",
        "Sequences that can be decoded at once: as many as may run, and as the KV blocks hold of the length "
        "seen lately.",
        capacity.slots,
    )
    if capacity.backlog_s is not None:
        yield GaugeMetricFamily(
            "kvferry_agent_prefill_backlog_seconds",
            "Seconds that the prompts which are here will still take. Absent until one was computed.",
            capacity.backlog_s,
        )
    if capacity.step_s is not None and capacity.sequence_s is not None:
        yield GaugeMetricFamily(
            "kvferry_agent_full_step_seconds",
            "What a step of decoding takes with all slots in use, by a fit to the steps seen lately. Absent "
            "until some were.",
            capacity.step_s + capacity.slots * capacity.sequence_s,
        )


class _EngineCollector(Collector):
    """Reads the engine's counters at scrape time."""

    def __init__(self, stats: Callable[[], Stats | None], backends: Callable[[], Sequence[str]]) -> None:
        self._stats = stats
        self._backends = backends

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
        if stats.capacity is not None:
            yield from _capacity_metrics(stats.capacity)
        for name, text, value in (
            ("agent_steps", "Engine steps.", stats.steps),
            ("agent_num_preemptions", "Sequences that lost their blocks to others.", stats.preemptions),
            (
                "agent_recomputes",
                "Prompts computed here because their KV could not be pulled.",
                stats.recomputes,
            ),
            ("agent_integrity_errors", "Audits of an allocator that failed.", stats.integrity_errors),
            ("transfer_pulls", "KV pulls that were proven valid.", plane.pulls),
            (
                "transfer_streamed_pulls",
                "Those that had blocks before the prefill had ended.",
                plane.streamed_pulls,
            ),
            ("transfer_bytes", "Bytes of KV pulled.", plane.pull_bytes),
            ("transfer_descriptors", "Descriptors posted for pulls.", plane.pull_descriptors),
            (
                "transfer_verify_seconds",
                "Seconds spent on checking pulled KV, part of pulling.",
                plane.verify_seconds,
            ),
            ("transfer_rebuilds", "Transfer engines destroyed and opened anew.", plane.rebuilds),
            ("transfer_handshakes", "Handshakes with other agents.", plane.handshakes),
            (
                "transfer_prefix_loans",
                "Times that part of the prefix cache was lent to another agent.",
                plane.prefix_loans,
            ),
            (
                "transfer_prefix_pulls",
                "Times that another agent was asked for part of its cache.",
                plane.prefix_pulls,
            ),
            (
                "transfer_prefix_pull_bytes",
                "Bytes of KV so pulled, apart from other pulls.",
                plane.prefix_pull_bytes,
            ),
        ):
            yield CounterMetricFamily(f"kvferry_{name}", text, value)
        for name, text, label, values, counts in (
            (
                "transfer_failures",
                "Failed KV pulls by reason; the log has a line for each.",
                "reason",
                PULL_FAILURE_REASONS,
                plane.pull_failures,
            ),
            (
                "transfer_prefix_pull_failures",
                "Pulls from another agent's cache that failed, by reason.",
                "reason",
                PULL_FAILURE_REASONS,
                plane.prefix_pull_failures,
            ),
            (
                "agent_prompt_tokens_by_source",
                "Prompt tokens by where their KV came from.",
                "source",
                _PROMPT_SOURCES,
                stats.prompt_tokens,
            ),
            (
                "transfer_leases_ended",
                "Leases that ended, by cause.",
                "cause",
                _LEASE_CAUSES,
                plane.leases_ended,
            ),
        ):
            family = CounterMetricFamily(f"kvferry_{name}", text, labels=[label])
            for word, count in (dict.fromkeys(values, 0) | counts).items():
                family.add_metric([word], count)
            yield family
        yield self._pull_times(plane.pull_times)

    def _pull_times(self, times: dict[str, PullTimes]) -> Metric:
        family = HistogramMetricFamily(
            "kvferry_transfer_pull_seconds",
            "From the first read of a pull to the proof that what was read is valid, by backend.",
            labels=["backend"],
        )
        bounds = [*map(str, PULL_SECONDS_BOUNDS), "+Inf"]
        for backend in dict.fromkeys((*self._backends(), *times)):
            counted = times.get(backend) or PullTimes()
            buckets = list(zip(bounds, accumulate(counted.buckets), strict=True))
            family.add_metric([backend], buckets, counted.seconds)
        return family
