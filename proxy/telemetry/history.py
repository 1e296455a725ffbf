# SPDX-License-Identifier: Apache-2.0
"""The last hour of traffic, for the operator's page: snapshots of the counters, and the latest failures.

Synchronous, bounded, and without a clock of its own. Snapshots are taken every `SLICE_S` seconds; requests
pay nothing for them. A quantile is that of a whole minute: of two seconds it would be that of a request or
two. Prometheus keeps what is older.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType

from kvferry.proxy.telemetry.metrics import (
    MAX_CHARTED_MODELS,
    PHASE_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    Totals,
)

SLICE_S = 2.0
NUM_SLICES = 150
HOUR_SLICE_S = 30.0
NUM_HOUR_SLICES = 120
QUANTILE_S = 60.0
MAX_FAILURES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a request failed. Requests that failed alike are one entry, described by the last of them.

    `agent`: the address of the agent that had the request last; empty where none had it.
    """

    endpoint: str
    status: int
    code: str
    model: str
    request_id: str
    message: str = ""
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """A way of failing, how often it was seen, and when last (monotonic seconds of this host)."""

    last: Failure
    count: int
    at: float


class FailureLog:
    """The latest `MAX_FAILURES` ways in which requests failed."""

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[str, int, str, str], FailureCount] = OrderedDict()

    def add(self, failure: Failure, now: float) -> None:
        """Count a request that has failed."""
        self._count(FailureCount(last=failure, count=1, at=now))

    def merge(self, counts: Iterable[FailureCount]) -> None:
        """Add what other logs of this host have counted."""
        merged = sorted([*self._failures.values(), *counts], key=lambda each: each.at)
        self._failures.clear()
        for each in merged:
            self._count(each)

    def latest(self) -> list[FailureCount]:
        """Return the ways in which requests failed, latest first."""
        return list(reversed(self._failures.values()))

    def _count(self, failure: FailureCount) -> None:
        last = failure.last
        kind = (last.endpoint, last.status, last.code, last.model)
        before = self._failures.pop(kind, None)
        count = failure.count if before is None else before.count + failure.count
        self._failures[kind] = FailureCount(last=last, count=count, at=failure.at)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """One value per slice, oldest first.

    Durations in seconds, those of the minute (`QUANTILE_S`) that ends with the slice, None where nothing was
    measured in it. `queued`: requests that waited at the end of the slice. `cached`: the share (0 … 1) of the
    prompts' tokens, in that minute, that prefix caches had. All else are rates per second within the slice.
    """

    slice_s: float
    ttft_p50: list[float | None]
    ttft_p95: list[float | None]
    ttft_p99: list[float | None]
    itl_p50: list[float | None]
    itl_p95: list[float | None]
    itl_p99: list[float | None]
    tpot_p50: list[float | None]
    tpot_p95: list[float | None]
    tpot_p99: list[float | None]
    queue_wait_p95: list[float | None]
    pull_p50: list[float | None]
    pull_p95: list[float | None]
    pull_p99: list[float | None]
    cached: list[float | None]
    queued: list[float]
    events: list[float]
    prompt_tokens: list[float]
    requests: list[float]
    failures: list[float]
    client_errors: list[float]
    server_errors: list[float]
    rejected: list[float]
    retries: list[float]
    migrations: list[float]
    pull_bytes: list[float]
    pull_failures: list[float]
    recomputes: list[float]
    leases_expired: list[float]


class _Ring:
    """The charts of one window: a row for each of its slices, made once, when the slice ends."""

    def __init__(self, slice_s: float, num_slices: int, pull_bounds: Sequence[float]) -> None:
        self._slice_s = slice_s
        self._num_slices = num_slices
        self._pull_bounds = pull_bounds
        self._last: tuple[float, Totals] | None = None
        self._rows: deque[tuple[float | None, ...]] = deque(maxlen=num_slices)
        """The values of each slice, in the order of `_EMPTY`."""

    def record(self, now: float, totals: Totals, minute: Totals) -> None:
        """End a slice, if it is long enough. `minute`: what was counted in the last `QUANTILE_S`."""
        if self._last is None:
            self._last = (now, totals)
            return
        seconds = now - self._last[0]
        if seconds < self._slice_s * 0.9:  # a timer is never exact
            return
        row = self._row(totals.minus(self._last[1]), minute, seconds)
        self._rows.append(tuple(row[name] for name in _EMPTY))
        self._last = (now, totals)

    def charts(self) -> Charts:
        """Return as many values of each as there are slices; those before the first snapshot are empty."""
        rows = [tuple(_EMPTY.values())] * (self._num_slices - len(self._rows)) + list(self._rows)
        lines = map(list, zip(*rows, strict=True))
        return Charts(slice_s=self._slice_s, **dict(zip(_EMPTY, lines, strict=True)))

    def _row(self, counted: Totals, minute: Totals, seconds: float) -> dict[str, float | None]:
        errors = counted.client_errors + counted.rejected
        rates = {
            "events": counted.events,
            "prompt_tokens": counted.prompt_tokens,
            "requests": counted.ended,
            "failures": counted.failed,
            "client_errors": counted.client_errors,
            "server_errors": counted.failed - errors,
            "rejected": counted.rejected,
            "retries": counted.retries,
            "migrations": counted.migrations,
            "pull_bytes": counted.pull_bytes,
            "pull_failures": counted.pull_failures,
            "recomputes": counted.recomputes,
            "leases_expired": counted.leases_expired,
        }
        return {
            **_quantiles("ttft", TTFT_BUCKETS, minute.ttft),
            **_quantiles("itl", TOKEN_BUCKETS, minute.itl),
            **_quantiles("tpot", TOKEN_BUCKETS, minute.tpot),
            **_quantiles("pull", self._pull_bounds, minute.pulls),
            "queue_wait_p95": quantile(PHASE_BUCKETS, minute.queue_wait, 0.95),
            "cached": minute.cached_tokens / minute.prompt_tokens if minute.prompt_tokens else None,
            "queued": counted.queued,
            **{name: count / seconds for name, count in rates.items()},
        }


def _quantiles(name: str, bounds: Sequence[float], counts: Sequence[int]) -> dict[str, float | None]:
    return {f"{name}_p{percent}": quantile(bounds, counts, percent / 100) for percent in (50, 95, 99)}


_EMPTY: Mapping[str, float | None] = MappingProxyType(
    {
        field.name: None if field.type == "list[float | None]" else 0.0
        for field in fields(Charts)
        if field.name != "slice_s"
    }
)


class History:
    """What the requests of the last five minutes did, and of the last hour.

    Args:
        pull_bounds: Bounds of the buckets of `Totals.pulls`.
    """

    def __init__(self, pull_bounds: Sequence[float] = ()) -> None:
        self._snapshots: deque[tuple[float, Totals]] = deque()
        """Of the last minute, and the one before."""
        self._minutes = _Ring(SLICE_S, NUM_SLICES, pull_bounds)
        self._hour = _Ring(HOUR_SLICE_S, NUM_HOUR_SLICES, pull_bounds)
        self._models: dict[str, History] = {}

    def record(self, totals: Totals, now: float, models: Mapping[str, Totals] = MappingProxyType({})) -> None:
        """Take a snapshot: what has been counted up to now (monotonic seconds), and of it by model, of at
        most `MAX_CHARTED_MODELS`.
        """
        snapshots = self._snapshots
        if snapshots and now <= snapshots[-1][0]:
            return
        for model, counted in models.items():
            if model not in self._models and len(self._models) < MAX_CHARTED_MODELS:
                self._models[model] = History()
                if snapshots:  # a model that is new had counted nothing by then
                    self._models[model].record(Totals(), snapshots[-1][0])
            if model in self._models:
                self._models[model].record(counted, now)
        snapshots.append((now, totals))
        while len(snapshots) > 2 and snapshots[1][0] <= now - QUANTILE_S:
            snapshots.popleft()
        minute = totals.minus(snapshots[0][1])
        self._minutes.record(now, totals, minute)
        self._hour.record(now, totals, minute)

    def of_model(self, model: str) -> History:
        """Return what the requests for one model did; nothing of one that is not recorded."""
        return self._models.get(model) or History()

    @asynccontextmanager
    async def recording(
        self, totals: Callable[[], Totals], models: Callable[[], Mapping[str, Totals]]
    ) -> AsyncIterator[None]:
        """Take a snapshot of `totals()` and `models()` every `SLICE_S` seconds while the context is open."""

        async def record() -> None:
            clock = asyncio.get_running_loop().time
            while True:
                self.record(totals(), clock(), models())
                await asyncio.sleep(SLICE_S)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(record())
            try:
                yield
            finally:
                task.cancel()

    def charts(self) -> Charts:
        """Return the last five minutes, in `NUM_SLICES` slices of `SLICE_S` seconds."""
        return self._minutes.charts()

    def hour(self) -> Charts:
        """Return the last hour, in `NUM_HOUR_SLICES` slices of `HOUR_SLICE_S` seconds."""
        return self._hour.charts()


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
