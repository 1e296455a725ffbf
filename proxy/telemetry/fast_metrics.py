# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and histograms for what happens with every token or every phase of a request.

They are Prometheus collectors like the client library's own, whose locks and label look-ups would cost a
request more than its routing. For one event loop: no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Value = str | tuple[str, ...]


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


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate the duration that `share` (0 … 1) of those counted do not exceed; None if there are none.

    Interpolates linearly within a bucket, as PromQL's `histogram_quantile` does: exact at the bounds. Beyond
    the last bound it is that bound.
    """
    rank = share * sum(counts)
    if not any(counts):
        return None
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and rank <= count:
            return lower + (bound - lower) * rank / count
        rank -= count
        lower = bound
    return lower
