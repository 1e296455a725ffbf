# SPDX-License-Identifier: Apache-2.0
"""The proxy's Prometheus metrics (docs/reference/metrics.md), in a registry of their own.

Names are vLLM's where they mean the same. Everything that may be counted is shown from the start, what has
the label `model` from the first ping of an agent that serves it: Prometheus cannot see a series grow that
begins to exist with its first count. Values of labels are short words, of which there are few.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice, zip_longest
from operator import add, sub
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.proxy.telemetry.fast_metrics import (
    BucketCounts,
    Histogram,
    LabelledCounter,
    LabelledGauge,
    LabelledHistogram,
)
from kvferry.proxy.wire.dialects import FOREIGN_DIALECTS

CLIENT_LEFT = 499
"""The status of a request whose client left before its end."""
TOO_MANY_REQUESTS = 429
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PHASE_BUCKETS = (0.0005, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOTAL_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
MAX_MODELS = 64
"""Models with series of their own."""
MAX_CHARTED_MODELS = 16
"""Models with charts of their own on the operator's page."""
PHASES = ("route", "prefill", "decode_wait", "decode")
_ENDPOINTS = ("completions", "chat/completions")
_STATUSES = (200, 400, 404, 429, CLIENT_LEFT, 500, 502, 503, 504)
_LEGS = ("prefill", "decode")
_REJECTIONS = ("queue_full", "queue_timeout")
_DROPS = ("delivered", "failed", "overflow")
_VERDICTS = ("proven", "vouched", "unproven", "suspect", "contradicted")


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has counted since it started, as far as the charts show it.

    `failed` requests are those that ended with an error; `client_errors` (4xx but 429) and `rejected` (429)
    are part of them. `ttft`, `tpot`, `itl` and `queue_wait` are counts per bucket (`TTFT_BUCKETS`,
    `TOKEN_BUCKETS` twice, `PHASE_BUCKETS`); so are `pulls`, by buckets of those who count them. From `pulls`
    on the agents have counted. `queued` is no count, but how many requests wait now.
    """

    events: int = 0
    ended: int = 0
    failed: int = 0
    client_errors: int = 0
    rejected: int = 0
    retries: int = 0
    migrations: int = 0
    queued: int = 0
    ttft: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TTFT_BUCKETS) + 1))
    tpot: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TOKEN_BUCKETS) + 1))
    itl: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TOKEN_BUCKETS) + 1))
    queue_wait: list[int] = msgspec.field(default_factory=lambda: [0] * (len(PHASE_BUCKETS) + 1))
    pulls: list[int] = []
    pull_bytes: int = 0
    pull_failures: int = 0
    recomputes: int = 0
    leases_expired: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def plus(self, other: Totals) -> Totals:
        """Return what two processes have counted together."""
        return self._combined(add, other)

    def minus(self, earlier: Totals) -> Totals:
        """Return what was counted since, and how many wait now."""
        return msgspec.structs.replace(self._combined(sub, earlier), queued=self.queued)

    def _combined(self, operation: Callable[[int, int], int], other: Totals) -> Totals:
        def combine(ours: Any, theirs: Any) -> Any:
            if isinstance(ours, int):
                return operation(ours, theirs)
            return [operation(*counts) for counts in zip_longest(ours, theirs, fillvalue=0)]

        return Totals(
            **{
                name: combine(ours, theirs)
                for name, ours, theirs in zip(
                    self.__struct_fields__, _values(self), _values(other), strict=True
                )
            }
        )


def _values(totals: Totals) -> Iterator[Any]:
    return (getattr(totals, name) for name in totals.__struct_fields__)


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its samples, to be sent to another process. `kind`: Prometheus' type."""

    name: str
    kind: str
    help: str
    samples: list[MetricSample]

    @classmethod
    def of(cls, metric: Metric) -> MetricFamily:
        samples = [MetricSample(sample.name, dict(sample.labels), sample.value) for sample in metric.samples]
        return cls(metric.name, metric.type, metric.documentation, samples)


@dataclass(slots=True)
class ModelCounts:
    """Plain numbers, for the charts: requests by how they ended, and events of streams."""

    events: int = 0
    ended: int = 0
    failed: int = 0
    client_errors: int = 0
    rejected: int = 0

    def add(self, status: int) -> None:
        """Count a request that has ended."""
        self.ended += 1
        if status >= 400 and status != CLIENT_LEFT:
            self.failed += 1
            self.rejected += status == TOO_MANY_REQUESTS
            self.client_errors += status < 500 and status != TOO_MANY_REQUESTS


class ModelMetrics(NamedTuple):
    """What is counted with every request for one model, looked up once."""

    model: str
    counts: ModelCounts
    ttft: BucketCounts
    tpot: BucketCounts
    itl: BucketCounts
    e2e: BucketCounts


class Metrics:
    """Everything that is counted. Requests are those of the completion endpoints.

    The label `model` is empty for what names no model that an agent has served, and beyond `MAX_MODELS`.
    """

    def __init__(self) -> None:
        self.events = 0
        """Events of streams that went to clients; counted with every one, so a plain number."""
        self.registry = registry = CollectorRegistry()
        info = Gauge(
            "kvferry_proxy_build_info", "1; what runs, in its labels.", ["version", "python"],
            registry=registry,
        )  # fmt: skip
        info.labels(version("kvferry"), platform.python_version()).set(1)
        self.requests = LabelledCounter(
            "kvferry_proxy_requests",
            "Requests by how they ended; 499: the client left.",
            ("endpoint", "model", "status"),
        )
        registry.register(self.requests)
        self.in_flight = LabelledGauge(
            "kvferry_proxy_requests_in_flight", "Requests now in each phase.", "phase", PHASES
        )
        registry.register(self.in_flight)
        registry.register(_EventCollector(self))
        self.ttft = LabelledHistogram(
            "kvferry_proxy_time_to_first_token_seconds",
            "From a streamed request's arrival to its first text.",
            "model",
            TTFT_BUCKETS,
        )
        registry.register(self.ttft)
        self.tpot = LabelledHistogram(
            "kvferry_proxy_request_time_per_output_token_seconds",
            "Mean time per event of a choice after the first, per streamed request.",
            "model",
            TOKEN_BUCKETS,
        )
        registry.register(self.tpot)
        self.itl = LabelledHistogram(
            "kvferry_proxy_inter_token_latency_seconds",
            "Time between arrivals of events within a stream.",
            "model",
            TOKEN_BUCKETS,
        )
        registry.register(self.itl)
        self.e2e = LabelledHistogram(
            "kvferry_proxy_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer.",
            "model",
            _TOTAL_BUCKETS,
        )
        registry.register(self.e2e)
        self.phases = LabelledHistogram(
            "kvferry_proxy_phase_seconds",
            "Where requests spend their time.",
            "phase",
            PHASE_BUCKETS,
            PHASES,
        )
        registry.register(self.phases)
        self.decode_only = Counter(
            "kvferry_proxy_decode_only_requests",
            "Requests given to a decode agent alone because no prefill agent was ready.",
            registry=registry,
        )
        self.retries = Counter(
            "kvferry_proxy_retries", "Requests given to another pair, by the leg that was lost.", ["leg"],
            registry=registry,
        )  # fmt: skip
        self.migrations = Counter(
            "kvferry_proxy_migrations",
            "Streams that broke in mid-answer and went on elsewhere.",
            registry=registry,
        )
        self.streamed_pulls = Counter(
            "kvferry_proxy_streamed_pulls", "Decode legs that were sent together with their prefill legs.",
            registry=registry,
        )  # fmt: skip
        self.prefix_sources = Counter(
            "kvferry_proxy_prefix_sources", "Prefill legs that named an agent to pull the beginning from.",
            registry=registry,
        )  # fmt: skip
        self.retries_denied = Counter(
            "kvferry_proxy_retries_denied", "Retries that the retry budget did not allow.", registry=registry
        )
        self.suspect_requests = Counter(
            "kvferry_proxy_suspect_requests",
            "Requests that were given to no other agent, for agents were lost while they served them.",
            registry=registry,
        )
        self.queue_length = Gauge(
            "kvferry_proxy_num_requests_waiting",
            "Requests that wait for an agent with room.",
            registry=registry,
        )
        self.queue_wait = Histogram(
            "kvferry_proxy_queue_wait_seconds",
            "How long requests waited for an agent with room, of those that had to.",
            PHASE_BUCKETS,
        )
        registry.register(self.queue_wait)
        self.rejections = Counter(
            "kvferry_proxy_rejections", "Requests rejected because all agents were busy.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.drops = Counter(
            "kvferry_proxy_drops", "Transfers dropped at the prefill agent, by outcome.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.prompts_recomputed = Counter(
            "kvferry_proxy_prompts_recomputed",
            "Prompts that another engine's decode server computed again, as its partner handed nothing over.",
            ["dialect"],
            registry=registry,
        )
        self.leases = LabelledCounter(
            "kvferry_proxy_leases_judged",
            "Decode legs of other engines by what is known of the KV that they read.",
            "verdict",
            _VERDICTS,
        )
        registry.register(self.leases)
        self.bad_pings = Counter(
            "kvferry_proxy_bad_pings", "Discovery frames that were dropped.", registry=registry
        )
        self.rejected_pings = Counter(
            "kvferry_proxy_rejected_pings", "Agents' pings that were rejected.", ["reason"], registry=registry
        )
        for counter, words in (
            (self.retries, _LEGS),
            (self.rejections, _REJECTIONS),
            (self.drops, _DROPS),
            (self.prompts_recomputed, FOREIGN_DIALECTS),
        ):
            for word in words:
                counter.labels(word)
        ProcessCollector(registry=registry)
        self._unserved = self._add_model("")
        self._models: dict[str, ModelMetrics] = {}

    def add_collector(self, collector: Collector) -> None:
        """Show what `collector` collects too, from now on."""
        self.registry.register(collector)

    def families(self) -> list[MetricFamily]:
        """Return all metrics as they are now."""
        return list(map(MetricFamily.of, self.registry.collect()))

    def serves(self, model: str) -> None:
        """Show the series of a model, which an agent serves, from now on. Idempotent."""
        if model and model not in self._models and len(self._models) < MAX_MODELS:
            self._models[model] = self._add_model(model)

    def of_model(self, model: str) -> ModelMetrics:
        """Return where requests for a model are counted."""
        return self._models.get(model, self._unserved)

    def ended(self, endpoint: str, status: int, model: str = "") -> None:
        """Count a request that has ended; `model` is that of its `ModelMetrics`."""
        self.of_model(model).counts.add(status)
        self.requests.add((endpoint, model, str(status)), 1)

    def totals(self) -> Totals:
        """Return what has been counted up to now."""
        counts = [self._unserved.counts, *(each.counts for each in self._models.values())]
        return Totals(
            events=self.events,
            ended=sum(each.ended for each in counts),
            failed=sum(each.failed for each in counts),
            client_errors=sum(each.client_errors for each in counts),
            rejected=sum(each.rejected for each in counts),
            retries=_value(self.retries),
            migrations=_value(self.migrations),
            queued=_value(self.queue_length),
            ttft=self.ttft.counts(),
            tpot=self.tpot.counts(),
            itl=self.itl.counts(),
            queue_wait=self.queue_wait.counts(),
        )

    def model_totals(self) -> dict[str, Totals]:
        """Return, for each of the first `MAX_CHARTED_MODELS` models, what is counted by model."""
        return {
            name: Totals(
                events=of.counts.events,
                ended=of.counts.ended,
                failed=of.counts.failed,
                client_errors=of.counts.client_errors,
                rejected=of.counts.rejected,
                ttft=of.ttft.counts(),
                tpot=of.tpot.counts(),
                itl=of.itl.counts(),
            )
            for name, of in islice(self._models.items(), MAX_CHARTED_MODELS)
        }

    def requests_in_flight(self) -> dict[str, int]:
        """Return the requests now in each phase that any request has been in."""
        return self.in_flight.counts()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _add_model(self, model: str) -> ModelMetrics:
        for endpoint in _ENDPOINTS:
            for status in _STATUSES:
                self.requests.add((endpoint, model, str(status)), 0)
        of = (histogram.of(model) for histogram in (self.ttft, self.tpot, self.itl, self.e2e))
        return ModelMetrics(model, ModelCounts(), *of)


class _EventCollector(Collector):
    """Reads what is counted as a plain number."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "kvferry_proxy_stream_events",
            "Events of streams that went to clients, about one for each token.",
            self._metrics.events,
        )


# Of several processes the first start, the lowest limit, and one and the same build.
_NO_SUMS = ("_created", "process_start_time_seconds", "process_max_fds", "_build_info")


def _value(metric: Counter | Gauge) -> int:
    """The sum over all labels."""
    return int(
        sum(
            sample.value
            for family in metric.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        )
    )


def sum_families(groups: Iterable[Sequence[MetricFamily]]) -> list[MetricFamily]:
    """Add up samples of the same name and labels, of several processes.

    Of counters and buckets that is what all have counted, of gauges what all hold. Of what cannot be added it
    is the least.
    """
    first: dict[str, MetricFamily] = {}
    sums: dict[str, dict[Hashable, MetricSample]] = {}
    for family in chain.from_iterable(groups):
        first.setdefault(family.name, family)
        samples = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            samples[key] = _sum(samples.get(key), sample)
    return [
        MetricFamily(name, family.kind, family.help, list(sums[name].values()))
        for name, family in first.items()
    ]


def exposition(families: Iterable[MetricFamily]) -> bytes:
    """Return the families in Prometheus' text format."""
    return generate_latest(_Families(families))


class _Families(Collector):
    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def _sum(one: MetricSample | None, other: MetricSample) -> MetricSample:
    if one is None:
        return other
    if one.name.endswith(_NO_SUMS):
        return MetricSample(one.name, one.labels, min(one.value, other.value))
    return MetricSample(one.name, one.labels, one.value + other.value)
