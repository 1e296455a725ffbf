# SPDX-License-Identifier: Apache-2.0
"""The proxy's Prometheus metrics (docs/reference/metrics.md), in a registry of their own.

Names are vLLM's where they mean the same. Everything that may be counted is shown from the start, what has
the label `model_name` from the first ping of an agent that serves it: Prometheus cannot see a series grow
that begins to exist with its first count. Values of labels are short words, of which there are few.

What happens with every token or every phase of a request is counted here without the client library's locks
and look-ups of labels (`BucketCounts`, `LabelledCounter`), which would cost a request more than its routing.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from operator import add, sub
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.objectives import DEFAULT, ModelObjectives, Objective
from kvferry.proxy.wire.dialects import FOREIGN_DIALECTS

C = TypeVar("C", bound=Collector)
Value = str | tuple[str, ...]

CLIENT_LEFT = 499
"""The status of a request whose client left before its end."""
TOO_MANY_REQUESTS = 429
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PHASE_BUCKETS = (0.0005, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0)
_TOTAL_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
VERDICTS = ("same", "different", "learning", "failed")
"""Of the canary, on one probe."""
MAX_MODELS = 64
"""Models with series of their own."""
MAX_CHARTED_MODELS = 16
"""Models with charts of their own on the operator's page."""
PHASES = ("route", "prefill", "decode_wait", "decode")
MODEL = "model_name"
"""The label, as vLLM names it."""
_APIS = ("completions", "chat/completions", "messages", "responses")
_STATUSES = (200, 400, 404, 429, CLIENT_LEFT, 500, 502, 503, 504)
_LEGS = ("prefill", "decode")
_REJECTIONS = ("queue_full", "queue_timeout", "objective")
_DROPS = ("delivered", "failed", "overflow")
_OBJECTIVES = ("ttft", "tpot")
_VERDICTS = ("proven", "vouched", "unproven", "suspect", "contradicted")


class BucketCounts:
    """How many durations (in seconds) fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    @property
    def sum(self) -> float:
        """All of them together."""
        return self._sum

    def counts(self) -> list[int]:
        """Return how many fell into each bucket; the last one has no upper bound."""
        return self._counts.copy()

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound, and how many do not exceed it; the last bound is infinity."""
        total = 0
        made = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            made.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return made


class LabelledHistogram(Collector):
    """One histogram for each value of a label, which must be few.

    Args:
        labels: One label, or several; a value is then a tuple.
    """

    def __init__(
        self, name: str, documentation: str, labels: str | tuple[str, ...], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._help = documentation
        self._labels = (labels,) if isinstance(labels, str) else labels
        self._bounds = bounds
        self._by_value: dict[Value, BucketCounts] = {}

    def of(self, value: Value) -> BucketCounts:
        """Return the histogram of one value."""
        found = self._by_value.get(value)
        if found is None:
            found = self._by_value[value] = BucketCounts(self._bounds)
        return found

    def counts(self) -> list[int]:
        """Return how many fell into each bucket, of all values together."""
        none = [0] * (len(self._bounds) + 1)
        return list(map(sum, zip(none, *(each.counts() for each in self._by_value.values()), strict=True)))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for value, counts in self._by_value.items():
            family.add_metric(_label_values(value), counts.buckets(), counts.sum)
        yield family


class LabelledGauge(Collector):
    """How many there are now of each value of a label, which must be few.

    Args:
        labels: One label, or several; a value is then a tuple.
        values: Those that are shown before anything was counted.
    """

    family: ClassVar[type[GaugeMetricFamily | CounterMetricFamily]] = GaugeMetricFamily

    def __init__(
        self, name: str, documentation: str, labels: str | tuple[str, ...], values: Iterable[Value] = ()
    ) -> None:
        self._name = name
        self._help = documentation
        self._labels = (labels,) if isinstance(labels, str) else labels
        self._counts: dict[Value, int] = dict.fromkeys(values, 0)

    def add(self, value: Value, count: int) -> None:
        """Count so many more, or fewer."""
        self._counts[value] = self._counts.get(value, 0) + count

    def move(self, before: Value, after: Value) -> None:
        """Count one as another value."""
        counts = self._counts
        counts[before] -= 1
        counts[after] = counts.get(after, 0) + 1

    def counts(self) -> Mapping[Value, int]:
        """Return the count of each value, also where there are none."""
        return MappingProxyType(self._counts)

    def collect(self) -> Iterable[Metric]:
        family = self.family(self._name, self._help, labels=self._labels)
        for value, count in self._counts.items():
            family.add_metric(_label_values(value), count)
        yield family


class LabelledCounter(LabelledGauge):
    """How many there have been of each value of a label, which must be few."""

    family = CounterMetricFamily


def _label_values(value: Value) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


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
    """What is counted with every request for one model, looked up once. `prediction_errors`: of the prefill
    and of the decode leg. `phases`: by phase.
    """

    model: str
    objective: Objective
    counts: ModelCounts
    ttft: BucketCounts
    tpot: BucketCounts
    itl: BucketCounts
    e2e: BucketCounts
    queue_wait: BucketCounts
    prediction_errors: tuple[BucketCounts, BucketCounts]
    phases: Mapping[str, BucketCounts]


class Metrics:
    """Everything that is counted. Requests are those of the completion endpoints.

    The label `model_name` is empty for what names no model that an agent has served, and beyond `MAX_MODELS`.

    Args:
        objectives: Of the requests that are counted as late.
    """

    def __init__(self, objectives: ModelObjectives = DEFAULT) -> None:
        self._objectives = objectives
        disable_created_metrics()  # type: ignore[no-untyped-call] # a second series of each counter, unused
        self.events = 0
        """Events of streams that went to clients; counted with every one, so a plain number."""
        self.registry = registry = CollectorRegistry()
        info = Gauge(
            "kvferry_proxy_build_info", "Always 1; the labels say which version runs.", ["version", "python"],
            registry=registry,
        )  # fmt: skip
        info.labels(VERSION, platform.python_version()).set(1)
        self.requests = self._register(
            LabelledCounter(
                "kvferry_proxy_requests",
                "Finished requests by HTTP status. 499: the client disconnected. An error in a stream counts "
                "with the status that it would have had.",
                ("endpoint", MODEL, "status"),
            )
        )
        self.in_flight = self._register(
            LabelledGauge(
                "kvferry_proxy_requests_in_flight",
                "Requests being served, by phase. A request has no model until its body has been read.",
                ("phase", MODEL),
            )
        )
        self._register(_EventCollector(self))
        self.prompt_tokens = self._register(
            LabelledCounter(
                "kvferry_proxy_prompt_tokens",
                "Prompt tokens of answered requests, as their usage reports. Retried requests count once.",
                MODEL,
            )
        )
        self.generation_tokens = self._register(
            LabelledCounter(
                "kvferry_proxy_generation_tokens",
                "Generated tokens of answered requests, as their usage reports. A stream that breaks off "
                "counts the tokens sent to the client.",
                MODEL,
            )
        )
        self.ttft = self._register(
            LabelledHistogram(
                "kvferry_proxy_time_to_first_token_seconds",
                "Time from the arrival of a streamed request to the first text sent to the client.",
                MODEL,
                TTFT_BUCKETS,
            )
        )
        self.tpot = self._register(
            LabelledHistogram(
                "kvferry_proxy_request_time_per_output_token_seconds",
                "Mean time between the tokens of a choice after the first one, per streamed request.",
                MODEL,
                TOKEN_BUCKETS,
            )
        )
        self.missed_objectives = self._register(
            LabelledCounter(
                "kvferry_proxy_missed_objectives",
                "Streamed requests that were slower than an objective: their first token than "
                "--ttft-objective-s (ttft), or their mean time per token than --tpot-objective-s (tpot); "
                "for the models that it names, --model-objectives.",
                ("objective", MODEL),
            )
        )
        self.itl = self._register(
            LabelledHistogram(
                "kvferry_proxy_inter_token_latency_seconds",
                "Time between two consecutive events of a stream.",
                MODEL,
                TOKEN_BUCKETS,
            )
        )
        self.e2e = self._register(
            LabelledHistogram(
                "kvferry_proxy_e2e_request_latency_seconds",
                "Time from the arrival of a request to the end of its answer.",
                MODEL,
                _TOTAL_BUCKETS,
            )
        )
        self.phases = self._register(
            LabelledHistogram(
                "kvferry_proxy_phase_seconds",
                "Time that requests spend in each phase: waiting for agents (route), prefill, waiting for "
                "the first event of the decode agent (decode_wait), decode.",
                ("phase", MODEL),
                PHASE_BUCKETS,
            )
        )
        self.prediction_errors = self._register(
            LabelledHistogram(
                "kvferry_proxy_prediction_error_ratio",
                "Actual time over the time that the choice of agents predicted: to the first token (leg "
                "prefill), per token after it (leg decode; streams). Above 1: it took longer. Requests that "
                "were retried are not counted.",
                ("leg", MODEL),
                RATIO_BUCKETS,
            )
        )
        self.decode_only = Counter(
            "kvferry_proxy_decode_only_requests",
            "Requests given to a decode agent alone because no prefill agent was ready.",
            registry=registry,
        )
        self.canary_probes = Counter(
            "kvferry_proxy_canary_probes",
            "Comparisons of a pair's answer with that of its decode agent alone, by verdict. different: "
            "wrong tokens or logprobs; learning: the tolerance is not known yet; failed: no answer.",
            ["verdict"],
            registry=registry,
        )
        self.canary_tokens = Counter(
            "kvferry_proxy_canary_tokens",
            "Tokens of the canary's probes, prompts included. They are not part of the tokens of requests.",
            registry=registry,
        )
        self.retries = Counter(
            "kvferry_proxy_retries",
            "Requests sent to another pair of agents after one agent failed, by the leg that failed.",
            ["leg"],
            registry=registry,
        )
        self.migrations = Counter(
            "kvferry_proxy_migrations",
            "Streams that lost their agent after the first token and were continued by another one.",
            registry=registry,
        )
        self.streamed_pulls = Counter(
            "kvferry_proxy_streamed_pulls",
            "Requests sent to the prefill and the decode agent at once, so that KV is pulled during prefill.",
            registry=registry,
        )
        self.prefix_sources = Counter(
            "kvferry_proxy_prefix_sources",
            "Prefill requests that named an agent whose cache has the first part of the prompt's KV.",
            registry=registry,
        )
        self.retries_denied = Counter(
            "kvferry_proxy_retries_denied",
            "Retries that were not made because the retry budget was used up.",
            registry=registry,
        )
        self.suspect_requests = Counter(
            "kvferry_proxy_suspect_requests",
            "Requests that were not retried because several agents failed while serving them.",
            registry=registry,
        )
        self.queue_length = self._register(
            LabelledGauge(
                "kvferry_proxy_num_requests_waiting",
                "Requests in the proxy's queue: every agent that fits is full.",
                MODEL,
            )
        )
        self.queue_wait = self._register(
            LabelledHistogram(
                "kvferry_proxy_queue_wait_seconds",
                "Time that requests spent in the proxy's queue. Requests that did not wait are not counted.",
                MODEL,
                PHASE_BUCKETS,
            )
        )
        self.rejections = Counter(
            "kvferry_proxy_rejections",
            "Requests rejected with 429: the queue was full (queue_full), the request waited longer than "
            "--queue-timeout-s (queue_timeout), or it has x-slo-reject and its first token would miss the "
            "objective (objective).",
            ["reason"],
            registry=registry,
        )
        self.drops = Counter(
            "kvferry_proxy_drops",
            "Requests to prefill agents to free KV that is not needed any more, by outcome. overflow: not "
            "sent, as too many were waiting.",
            ["outcome"],
            registry=registry,
        )
        self.prompts_recomputed = Counter(
            "kvferry_proxy_prompts_recomputed",
            "Prompts that another engine's decode server computed again because it got no KV.",
            ["dialect"],
            registry=registry,
        )
        self.leases = self._register(
            LabelledCounter(
                "kvferry_proxy_leases_judged",
                "Decode requests to other engines, by how certain it is that the KV they read was valid.",
                "verdict",
                _VERDICTS,
            )
        )
        self.bad_pings = Counter(
            "kvferry_proxy_bad_pings",
            "Messages on the discovery port that were dropped because they are not valid pings.",
            registry=registry,
        )
        self.rejected_pings = Counter(
            "kvferry_proxy_rejected_pings",
            "Valid pings of agents that were rejected, by reason.",
            ["reason"],
            registry=registry,
        )
        self.rejected_keys = Counter(
            "kvferry_proxy_rejected_cluster_keys",
            "Connections to the discovery port that were rejected for their cluster key, by reason: another "
            "key than the proxy's (other_key), none (no_key), or one where the proxy has none "
            "(unexpected_key). An agent tries again every few seconds.",
            ["reason"],
            registry=registry,
        )
        for counter, words in (
            (self.retries, _LEGS),
            (self.rejections, _REJECTIONS),
            (self.drops, _DROPS),
            (self.canary_probes, VERDICTS),
            (self.prompts_recomputed, FOREIGN_DIALECTS),
        ):
            for word in words:
                counter.labels(word)
        ProcessCollector(registry=registry)
        self._unserved = self._add_model("")
        self.models: dict[str, ModelMetrics] = {}
        """Those with series of their own; to be read only."""

    def add_collector(self, collector: Collector) -> None:
        """Show what `collector` collects too, from now on."""
        self._register(collector)

    def serves(self, model: str) -> None:
        """Show the series of a model, which an agent serves, from now on. Idempotent."""
        if model and model not in self.models and len(self.models) < MAX_MODELS:
            self.models[model] = self._add_model(model)

    def of_model(self, model: str) -> ModelMetrics:
        """Return where requests for a model are counted."""
        return self.models.get(model, self._unserved)

    def ended(self, api: str, status: int, model: str = "") -> None:
        """Count a request that has ended; `model` is that of its `ModelMetrics`."""
        self.of_model(model).counts.add(status)
        self.requests.add((api, model, str(status)), 1)

    def num_client_tokens(self) -> int:
        """Return how many tokens clients' requests have used, prompts included."""
        return sum(
            each
            for counter in (self.prompt_tokens, self.generation_tokens)
            for each in counter.counts().values()
        )

    def totals(self) -> Totals:
        """Return what has been counted up to now."""
        counts = [self._unserved.counts, *(each.counts for each in self.models.values())]
        return Totals(
            events=self.events,
            ended=sum(each.ended for each in counts),
            failed=sum(each.failed for each in counts),
            client_errors=sum(each.client_errors for each in counts),
            rejected=sum(each.rejected for each in counts),
            retries=_value(self.retries),
            migrations=_value(self.migrations),
            queued=sum(self.queue_length.counts().values()),
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
            for name, of in islice(self.models.items(), MAX_CHARTED_MODELS)
        }

    def requests_in_flight(self) -> dict[str, int]:
        """Return the requests now in each phase."""
        requests = Count[str]()
        for value, count in self.in_flight.counts().items():
            requests[value[0]] += count
        return +requests

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _register(self, collector: C) -> C:
        self.registry.register(collector)
        return collector

    def _add_model(self, model: str) -> ModelMetrics:
        for api in _APIS:
            for status in _STATUSES:
                self.requests.add((api, model, str(status)), 0)
        for phase in PHASES:
            self.in_flight.add((phase, model), 0)
        for objective in _OBJECTIVES:
            self.missed_objectives.add((objective, model), 0)
        for counted in (self.queue_length, self.prompt_tokens, self.generation_tokens):
            counted.add(model, 0)
        return ModelMetrics(
            model=model,
            objective=self._objectives.of(model),
            counts=ModelCounts(),
            ttft=self.ttft.of(model),
            tpot=self.tpot.of(model),
            itl=self.itl.of(model),
            e2e=self.e2e.of(model),
            queue_wait=self.queue_wait.of(model),
            prediction_errors=(
                self.prediction_errors.of(("prefill", model)),
                self.prediction_errors.of(("decode", model)),
            ),
            phases={phase: self.phases.of((phase, model)) for phase in PHASES},
        )


class _EventCollector(Collector):
    """Reads what is counted as a plain number."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "kvferry_proxy_stream_events",
            "Server-sent events that were sent to clients; most carry one token.",
            self._metrics.events,
        )


def _value(counter: Counter) -> int:
    """The sum over all labels."""
    return int(sum(sample.value for family in counter.collect() for sample in family.samples))
