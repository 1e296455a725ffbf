# SPDX-License-Identifier: Apache-2.0
"""The agent's /metrics page (docs/reference/metrics.md). One registry per agent, none global.

Names are vLLM's where they mean the same. Everything that may be counted is shown from the start: Prometheus
cannot see a series grow that begins to exist with its first count.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.agent.messages.requests import Stats, Timing
from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.wire.registration import Capacity
from kvferry.transfer.events import PULL_FAILURE_REASONS, PULL_SECONDS_BOUNDS, PullTimes

_PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_STATUSES = (200, 400, 404, 413, 499, 500, 503)
_PHASES = ("queue", "prefix_pull", "prefill", "pull_wait", "pull", "pull_tail", "decode_queue", "first_step")
_FINISH_REASONS = ("stop", "length", "abort", "error")
_LEASE_CAUSES = ("released", "expired", "dropped", "withdrawn")
_PROMPT_SOURCES = ("computed", "cached", "pulled", "pulled_prefix")
VLLM_NAMES = MappingProxyType(
    {
        "num_requests_running": ("num_requests_running",),
        "num_requests_waiting": ("num_requests_waiting",),
        "kv_cache_usage_perc": ("kv_cache_usage_perc",),
        "num_preemptions": ("num_preemptions",),
        "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
        "prompt_tokens_cached": ("prefix_cache_hits",),
        "generation_tokens": ("generation_tokens",),
        "request_success": ("request_success",),
        "request_prompt_tokens": ("request_prompt_tokens",),
        "request_generation_tokens": ("request_generation_tokens",),
        "request_queue_time_seconds": ("request_queue_time_seconds",),
    }
)
"""Metrics (without `kvferry_agent_`) that are also shown as vLLM (0.32) names them (without `vllm:`)."""


class AgentMetrics:
    """Counts requests, prompts and tokens, and shows the engine's last snapshot when scraped.

    Args:
        stats: Returns that snapshot, or None before the first.
        backends: Returns the transfer backends that work here, as far as they are known yet.
        model: The name by which it is served.
    """

    def __init__(
        self,
        stats: Callable[[], Stats | None],
        backends: Callable[[], Sequence[str]] = tuple,
        model: str = "",
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # a second series of each counter, unused
        self._model = model
        self.generation_tokens = 0
        """Tokens sampled here; counted with every one, so a plain number."""
        self.registry = registry = CollectorRegistry()
        info = Gauge(
            "kvferry_agent_build_info", "Always 1; the labels say which version runs.", ["version", "python"],
            registry=registry,
        )  # fmt: skip
        info.labels(VERSION, platform.python_version()).set(1)
        self._requests = Counter(
            "kvferry_agent_requests",
            "Finished requests by HTTP status. 499: the client or proxy disconnected. A client's request "
            "counts once at its prefill agent and once at its decode agent.",
            ["status"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "kvferry_agent_prompt_tokens",
            "Tokens of prompts processed by this agent, computed or found in its prefix cache. Prompts whose "
            "KV was pulled from a prefill agent are not counted.",
            registry=registry,
        )
        self._cached_tokens = Counter(
            "kvferry_agent_prompt_tokens_cached",
            "Prompt tokens found in the prefix cache; part of kvferry_agent_prompt_tokens_total.",
            registry=registry,
        )
        self._choices = Counter(
            "kvferry_agent_request_success",
            "Finished choices by finish reason. abort: the client or proxy disconnected.",
            ["finished_reason"],
            registry=registry,
        )
        self._prompt_length = Histogram(
            "kvferry_agent_request_prompt_tokens",
            "Tokens per prompt, of the prompts in kvferry_agent_prompt_tokens_total.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.answer_tokens = Histogram(
            "kvferry_agent_request_generation_tokens",
            "Generated tokens per request, of all its choices. Counted at the agent where the request ended.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._queue_time = Histogram(
            "kvferry_agent_request_queue_time_seconds",
            "Time that a request waited in the agent's queue before its first step or its pull.",
            buckets=_PHASE_BUCKETS_S,
            registry=registry,
        )
        self._phases = Histogram(
            "kvferry_agent_phase_seconds",
            "Time that requests spent in each phase at this agent. Skipped phases are not counted.",
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
        return generate_latest(self.registry) + generate_latest(_VllmNames(self.registry, self._model))


class _VllmNames(Collector):
    """Metrics once more as vLLM names and labels them: for the panels and routers that are made for it."""

    def __init__(self, ours: Collector, model: str) -> None:
        self._ours = ours
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for metric in self._ours.collect():
            for name in VLLM_NAMES.get(metric.name.removeprefix("kvferry_agent_"), ()):
                renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
                for sample in metric.samples:
                    suffix = sample.name.removeprefix(metric.name)
                    renamed.add_sample(renamed.name + suffix, sample.labels | self._labels, sample.value)
                yield renamed


class _TokenCollector(Collector):
    """Reads what is counted as a plain number."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "kvferry_agent_generation_tokens",
            "Tokens sampled by this agent. The first token of an answer is sampled by the prefill agent, the "
            "others by the decode agent.",
            self._metrics.generation_tokens,
        )


def _capacity_metrics(capacity: Capacity) -> Iterator[Metric]:
    """Yield what the engine has measured of itself; of gauges only those that it knows yet."""
    yield CounterMetricFamily(
        "kvferry_agent_prefill_seconds", "Time that the engine spent on prompts.", capacity.prefill_s
    )
    yield GaugeMetricFamily(
        "kvferry_agent_decode_slots",
        "Sequences that can be decoded at once, limited by --max-num-seqs and by the KV blocks for sequences "
        "of the recent length.",
        capacity.slots,
    )
    if capacity.backlog_s is not None:
        yield GaugeMetricFamily(
            "kvferry_agent_prefill_backlog_seconds",
            "Time needed to compute the prompts that are queued or running here. Absent until one was "
            "computed.",
            capacity.backlog_s,
        )
    if capacity.step_s is not None and capacity.sequence_s is not None:
        yield GaugeMetricFamily(
            "kvferry_agent_full_step_seconds",
            "Estimated time of a decode step with all slots in use. Absent until enough steps were measured.",
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
            "kvferry_agent_num_requests_running", "Sequences that are running.", stats.running
        )
        yield GaugeMetricFamily(
            "kvferry_agent_num_requests_waiting",
            "Requests waiting for a slot or for KV blocks.",
            stats.waiting,
        )
        blocks = GaugeMetricFamily(
            "kvferry_agent_kv_blocks",
            "KV blocks by state. leased: kept for a decode agent that reads them; quarantined: of a failed "
            "pull that may still be written to.",
            labels=["state"],
        )
        for state, count in (
            ("free", stats.blocks_free),
            ("used", stats.blocks_used),
            ("leased", stats.blocks_leased),
            ("quarantined", stats.blocks_quarantined),
        ):
            blocks.add_metric([state], count)
        yield blocks
        yield GaugeMetricFamily(
            "kvferry_agent_kv_cache_usage_perc",
            "Share of the KV blocks that is not free, 0 to 1.",
            1 - stats.blocks_free / stats.blocks_total if stats.blocks_total else 0.0,
        )
        if stats.capacity is not None:
            yield from _capacity_metrics(stats.capacity)
        for name, text, value in (
            ("agent_steps", "Engine steps.", stats.steps),
            ("agent_num_preemptions", "Sequences preempted to free KV blocks for others.", stats.preemptions),
            (
                "agent_recomputes",
                "Prompts computed by this decode agent because pulling their KV failed.",
                stats.recomputes,
            ),
            (
                "agent_integrity_errors",
                "Failed self-checks of the KV allocator.",
                stats.integrity_errors,
            ),
            ("transfer_pulls", "Successful KV pulls.", plane.pulls),
            (
                "transfer_streamed_pulls",
                "Successful KV pulls that began before the prefill had finished.",
                plane.streamed_pulls,
            ),
            ("transfer_bytes", "Bytes of KV pulled from prefill agents.", plane.pull_bytes),
            ("transfer_descriptors", "Contiguous memory regions read by KV pulls.", plane.pull_descriptors),
            (
                "transfer_verify_seconds",
                "Time spent on verifying pulled KV (--verify-kv); part of kvferry_transfer_pull_seconds.",
                plane.verify_seconds,
            ),
            (
                "transfer_rebuilds",
                "Transfer backends reopened after failed pulls.",
                plane.rebuilds,
            ),
            ("transfer_handshakes", "Connections set up with other agents for transfers.", plane.handshakes),
            (
                "transfer_prefix_loans",
                "Times that KV of this agent's prefix cache was leased to a prefill agent.",
                plane.prefix_loans,
            ),
            (
                "transfer_prefix_pulls",
                "Times that this agent asked another one for KV of its prefix cache.",
                plane.prefix_pulls,
            ),
            (
                "transfer_prefix_pull_bytes",
                "Bytes of KV pulled from other agents' prefix caches; not in kvferry_transfer_bytes_total.",
                plane.prefix_pull_bytes,
            ),
        ):
            yield CounterMetricFamily(f"kvferry_{name}", text, value)
        for name, text, label, values, counts in (
            (
                "transfer_failures",
                "Failed KV pulls by reason. The agent's log has a line for each.",
                "reason",
                PULL_FAILURE_REASONS,
                plane.pull_failures,
            ),
            (
                "transfer_prefix_pull_failures",
                "Failed pulls from other agents' prefix caches, by reason.",
                "reason",
                PULL_FAILURE_REASONS,
                plane.prefix_pull_failures,
            ),
            (
                "agent_prompt_tokens_by_source",
                "Prompt tokens by the origin of their KV: computed, from the prefix cache (cached), pulled "
                "from a prefill agent, or from another agent's prefix cache (pulled_prefix).",
                "source",
                _PROMPT_SOURCES,
                stats.prompt_tokens,
            ),
            (
                "transfer_leases_ended",
                "Leases on KV of this agent that ended, by cause. released: the reader has read it; expired: "
                "the reader stopped renewing it; dropped: the proxy gave it up; withdrawn: this agent did.",
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
            "Duration of KV pulls, including the check that what was read is valid, by backend.",
            labels=["backend"],
        )
        bounds = [*map(str, PULL_SECONDS_BOUNDS), "+Inf"]
        for backend in dict.fromkeys((*self._backends(), *times)):
            counted = times.get(backend) or PullTimes()
            buckets = list(zip(bounds, accumulate(counted.buckets), strict=True))
            family.add_metric([backend], buckets, counted.seconds)
        return family
