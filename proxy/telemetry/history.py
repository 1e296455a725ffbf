# SPDX-License-Identifier: Apache-2.0
"""The last minutes of traffic, for the operator's page: snapshots of the counters, and the latest failures.

Synchronous, bounded, and without a clock of its own. Snapshots are taken every `SLICE_S` seconds; requests
pay nothing for them. Prometheus keeps what is older.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from kvferry.proxy.telemetry.fast_metrics import quantile
from kvferry.proxy.telemetry.metrics import TOKEN_BUCKETS, TTFT_BUCKETS, Totals

SLICE_S = 2.0
NUM_SLICES = 150
MAX_FAILURES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a request failed. Requests that failed alike are one entry, described by the last of them."""

    endpoint: str
    status: int
    code: str
    model: str
    request_id: str


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

    Durations in seconds, None where nothing was measured; rates per second.
    """

    slice_s: float
    ttft_p50: list[float | None]
    ttft_p95: list[float | None]
    tpot_p50: list[float | None]
    tpot_p95: list[float | None]
    events: list[float]
    requests: list[float]
    failures: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """What happened between two snapshots."""

    seconds: float
    totals: Totals

    def rate(self, count: int) -> float:
        return count / self.seconds


class History:
    """What the requests of the last `NUM_SLICES * SLICE_S` seconds did."""

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, Totals]] = deque(maxlen=NUM_SLICES + 1)

    def record(self, totals: Totals, now: float) -> None:
        """Take a snapshot: what has been counted up to now (monotonic seconds)."""
        if not self._snapshots or now > self._snapshots[-1][0]:
            self._snapshots.append((now, totals))

    @asynccontextmanager
    async def recording(self, totals: Callable[[], Totals]) -> AsyncIterator[None]:
        """Take a snapshot of `totals()` every `SLICE_S` seconds while the context is open."""

        async def record() -> None:
            clock = asyncio.get_running_loop().time
            while True:
                self.record(totals(), clock())
                await asyncio.sleep(SLICE_S)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(record())
            try:
                yield
            finally:
                task.cancel()

    def charts(self) -> Charts:
        """Return `NUM_SLICES` values of each; those before the first snapshot are empty."""
        made = [
            _Slice(seconds=to - since, totals=after.minus(before))
            for (since, before), (to, after) in pairwise(self._snapshots)
        ]
        slices = [_Slice(seconds=SLICE_S, totals=Totals())] * (NUM_SLICES - len(made)) + made

        def quantiles(
            counts: Callable[[Totals], Sequence[int]], bounds: Sequence[float], share: float
        ) -> list[float | None]:
            return [quantile(bounds, counts(each.totals), share) for each in slices]

        return Charts(
            slice_s=SLICE_S,
            ttft_p50=quantiles(lambda totals: totals.ttft, TTFT_BUCKETS, 0.5),
            ttft_p95=quantiles(lambda totals: totals.ttft, TTFT_BUCKETS, 0.95),
            tpot_p50=quantiles(lambda totals: totals.tpot, TOKEN_BUCKETS, 0.5),
            tpot_p95=quantiles(lambda totals: totals.tpot, TOKEN_BUCKETS, 0.95),
            events=[each.rate(each.totals.events) for each in slices],
            requests=[each.rate(each.totals.ended) for each in slices],
            failures=[each.rate(each.totals.failed) for each in slices],
        )
