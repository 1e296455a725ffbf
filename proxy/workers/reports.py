# SPDX-License-Identifier: Apache-2.0
"""What several processes of one proxy have counted, as one.

Samples of the same name and labels are added up: of a gauge that is what all processes hold together, of
a counter or a histogram's bucket what all have counted. A counter never falls when a process ends, because
what it reported last stays in the sum (what it counted after that is lost with it).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.proxy.telemetry.history import History, HistoryState

GAUGE = "gauge"
CREATED = "_created"
"""Ends the name of the sample that says since when something is counted: of several, the earliest counts."""
IN_FLIGHT = "kvferry_requests_in_flight"


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its samples."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has counted."""

    families: list[Family]
    history: HistoryState


class Reports:
    """The latest report of every process, and the sum of those that have ended."""

    def __init__(self) -> None:
        self._latest: dict[Hashable, Report] = {}
        self._ended: list[Family] = []
        self._ended_history = History()

    def keep(self, process: Hashable, report: Report) -> None:
        """Remember a process's latest report."""
        self._latest[process] = report

    def end(self, process: Hashable) -> None:
        """The process has ended: it holds nothing any more, but has counted what it has counted."""
        report = self._latest.pop(process, None)
        if report is not None:
            counted = [family for family in report.families if family.kind != GAUGE]
            self._ended = added([self._ended, counted])
            self._ended_history.absorb(report.history)

    def families(self) -> list[Family]:
        """All metrics of all processes."""
        return added([self._ended, *(report.families for report in self._latest.values())])

    def history(self) -> History:
        """The latest minutes of all processes, those that have ended included."""
        history = History()
        for state in (self._ended_history.state(), *(report.history for report in self._latest.values())):
            history.absorb(state)
        return history


def families_of(metrics: Iterable[Metric]) -> list[Family]:
    """What a Prometheus registry has collected, ready to be sent."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [Sample(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in metrics
    ]


def added(groups: Iterable[Sequence[Family]]) -> list[Family]:
    """One family for each name, in the order in which they are first seen."""
    heads: dict[str, Family] = {}
    sums: dict[str, dict[Hashable, Sample]] = {}
    for families in groups:
        for family in families:
            heads.setdefault(family.name, family)
            samples = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                samples[key] = _together(samples.get(key), sample)
    return [Family(name, head.kind, head.help, list(sums[name].values())) for name, head in heads.items()]


def exposition(families: Sequence[Family]) -> bytes:
    """The families in Prometheus' text format."""
    return generate_latest(_Families(families))


def in_flight(families: Sequence[Family]) -> dict[str, int]:
    """Requests now in each phase that any request has been in."""
    return {
        sample.labels["phase"]: int(sample.value)
        for family in families
        if family.name == IN_FLIGHT
        for sample in family.samples
    }


class _Families(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


def _together(one: Sample | None, other: Sample) -> Sample:
    if one is None:
        return other
    value = min(one.value, other.value) if one.name.endswith(CREATED) else one.value + other.value
    return Sample(one.name, one.labels, value)
