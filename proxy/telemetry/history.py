# SPDX-License-Identifier: Apache-2.0
"""The last minutes of traffic, for the operator's page: a ring of slices and the latest failures.

Synchronous, bounded, and without a clock of its own: whoever records is told the time (monotonic seconds).
Recording costs an addition; nothing runs while nobody records or asks. Prometheus keeps what is older.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

SLICE_S = 2.0
NUM_SLICES = 150
MAX_FAILURES = 30
# Spreads count in bins that are 2^(1/8), about 9 %, wide, from 0.1 ms to some hours.
_BINS_PER_OCTAVE = 8
_SMALLEST_S = 1e-4
_LAST_BIN = 28 * _BINS_PER_OCTAVE


@dataclass(slots=True)
class Spread:
    """How durations are distributed, within 5 % of each, in memory that does not grow with their number."""

    bins: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        octaves = math.log2(max(seconds, _SMALLEST_S) / _SMALLEST_S)
        position = min(round(octaves * _BINS_PER_OCTAVE), _LAST_BIN)
        self.bins[position] = self.bins.get(position, 0) + 1
        self.total += 1

    def absorb(self, other: Spread) -> None:
        """Count what `other` has counted."""
        for position, count in other.bins.items():
            self.bins[position] = self.bins.get(position, 0) + count
        self.total += other.total

    def quantile(self, share: float) -> float | None:
        """The duration that `share` (0 … 1) of those counted do not exceed; None if there were none."""
        rank = max(1, math.ceil(share * self.total))
        for position in sorted(self.bins):
            rank -= self.bins[position]
            if rank <= 0:
                return _SMALLEST_S * math.exp2(position / _BINS_PER_OCTAVE)
        return None


@dataclass(slots=True)
class Slice:
    """What happened within `SLICE_S` seconds. `number` counts slices since the clock's zero."""

    number: int
    events: int = 0
    ended: int = 0
    failed: int = 0
    ttft: Spread = field(default_factory=Spread)
    tpot: Spread = field(default_factory=Spread)

    def absorb(self, other: Slice) -> None:
        """Count what `other` has counted in the same seconds."""
        self.events += other.events
        self.ended += other.ended
        self.failed += other.failed
        self.ttft.absorb(other.ttft)
        self.tpot.absorb(other.tpot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a request failed. Requests that failed alike are one entry, told by the last of them."""

    endpoint: str
    status: int
    code: str
    model: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """A way of failing, how often it was seen, and when last."""

    last: Failure
    count: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryState:
    """All that a `History` remembers; its slices and failures in no particular order."""

    slices: list[Slice]
    failures: list[FailureCount]


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """One value per slice, oldest first; the last slice is the last that is complete.

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


class History:
    """What the requests of the last `NUM_SLICES * SLICE_S` seconds did."""

    def __init__(self) -> None:
        self._ring: list[Slice | None] = [None] * NUM_SLICES
        self._failures: OrderedDict[tuple[str, int, str, str], FailureCount] = OrderedDict()
        self._latest = Slice(-1)

    def events(self, count: int, now: float) -> None:
        """So many events of streams went to clients."""
        self._slice(now).events += count

    def first_text(self, seconds: float, now: float) -> None:
        """A streamed request showed its first text this long after its arrival."""
        self._slice(now).ttft.add(seconds)

    def per_event(self, seconds: float, now: float) -> None:
        """A streamed request ended, with this mean time per event of a choice after the first."""
        self._slice(now).tpot.add(seconds)

    def ended(self, now: float) -> None:
        """A request was answered, or its client left."""
        self._slice(now).ended += 1

    def failed(self, failure: Failure, now: float) -> None:
        """A request ended in an error. Past `MAX_FAILURES` ways of failing, the stalest is forgotten."""
        current = self._slice(now)
        current.ended += 1
        current.failed += 1
        self._count_failure(FailureCount(last=failure, count=1, at=now))
        self._forget_failures()

    def failures(self) -> list[FailureCount]:
        """The ways in which requests failed, latest first."""
        return list(reversed(self._failures.values()))

    def state(self) -> HistoryState:
        """What another history can absorb. It is not a copy."""
        slices = [piece for piece in self._ring if piece is not None]
        return HistoryState(slices=slices, failures=self.failures())

    def absorb(self, other: HistoryState) -> None:
        """Remember what another process does. Both were told the time by the clock of one host."""
        for piece in other.slices:
            held = self._ring[piece.number % NUM_SLICES]
            if held is None or held.number < piece.number:
                held = self._ring[piece.number % NUM_SLICES] = Slice(piece.number)
            if held.number == piece.number:
                held.absorb(piece)
        for told in other.failures:
            self._count_failure(told)
        # The stalest first, as if all had been told here.
        self._failures = OrderedDict(sorted(self._failures.items(), key=lambda item: item[1].at))
        self._forget_failures()

    def charts(self, now: float) -> Charts:
        """Every complete slice that is still remembered, and an empty one where nothing happened."""
        current = int(now / SLICE_S)
        slices = [self._at(number) or Slice(number) for number in range(current - NUM_SLICES + 1, current)]

        def each(value: Callable[[Slice], float | None]) -> list[float | None]:
            return [value(piece) for piece in slices]

        return Charts(
            slice_s=SLICE_S,
            ttft_p50=each(lambda piece: piece.ttft.quantile(0.5)),
            ttft_p95=each(lambda piece: piece.ttft.quantile(0.95)),
            tpot_p50=each(lambda piece: piece.tpot.quantile(0.5)),
            tpot_p95=each(lambda piece: piece.tpot.quantile(0.95)),
            events=[piece.events / SLICE_S for piece in slices],
            requests=[piece.ended / SLICE_S for piece in slices],
            failures=[piece.failed / SLICE_S for piece in slices],
        )

    def _count_failure(self, told: FailureCount) -> None:
        last = told.last
        alike = (last.endpoint, last.status, last.code, last.model)
        before = self._failures.pop(alike, None)
        if before is not None:
            latest = max(before, told, key=lambda each: each.at)
            told = FailureCount(last=latest.last, count=before.count + told.count, at=latest.at)
        self._failures[alike] = told

    def _forget_failures(self) -> None:
        while len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def _slice(self, now: float) -> Slice:
        number = int(now / SLICE_S)
        if number != self._latest.number:
            found = self._at(number)
            if found is None:
                found = self._ring[number % NUM_SLICES] = Slice(number)
            self._latest = found
        return self._latest

    def _at(self, number: int) -> Slice | None:
        found = self._ring[number % NUM_SLICES]
        return found if found is not None and found.number == number else None
