# SPDX-License-Identifier: Apache-2.0
"""Turns one report from every TP rank into one event (I6, docs/architecture.md).

Pure. A failed rank fails the whole, and there is no outcome until every rank is terminal. Reports that are
repeated, late or of unknown keys are ignored; a rank that contradicts itself has failed. Finished keys stay
in a bounded memory, so that a late report cannot open them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.transfer.events import RankRead

MAX_TOMBSTONES = 4096

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank's part, or the whole, ended. After a failure `quiescent` may be false: bytes may still
    land.

    The whole is quiescent only if every rank is.
    """

    ok: bool
    reason: str = ""
    quiescent: bool = True
    nbytes: int = 0
    descriptors: int = 0
    reads: tuple[RankRead, ...] = ()
    """Of each rank that has read."""


@dataclass(slots=True)
class _Group:
    reports: dict[int, Outcome] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    """Ranks that failed and may still be written to."""
    settled: bool = False


class Aggregator(Generic[K]):
    """Collects the reports of a fixed number of ranks per key."""

    def __init__(self, num_ranks: int, *, max_tombstones: int = MAX_TOMBSTONES) -> None:
        self._num_ranks = num_ranks
        self._max_tombstones = max_tombstones
        self._groups: dict[K, _Group] = {}
        self._tombstones: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def expect(self, key: K) -> None:
        """Begin to collect for a key that was never used before."""
        if key in self._groups or key in self._tombstones:
            raise AssertionError(f"{key!r} is already collected")
        self._groups[key] = _Group()

    def report(self, key: K, rank: int, report: Outcome) -> Outcome | None:
        """Add one rank's report. Returns the outcome, once, when it completes the set."""
        group = self._groups.get(key)
        if group is None or group.settled or not 0 <= rank < self._num_ranks:
            return None
        first = group.reports.get(rank)
        if first is None or (first.ok and not report.ok):
            group.reports[rank] = report
            if not report.quiescent:
                group.writing.add(rank)
        if len(group.reports) < self._num_ranks:
            return None
        group.settled = True
        outcome = _outcome(list(group.reports.values()), quiescent=not group.writing)
        if outcome.quiescent:
            self._forget(key)
        return outcome

    def discard(self, key: K) -> None:
        """Stop collecting for a key; one that is complete stays as it is."""
        group = self._groups.get(key)
        if group is not None and not group.settled:
            self._forget(key)

    def quiescent(self, key: K, rank: int) -> bool:
        """Note that nothing writes to one rank any more. Returns True, once, when a failed whole becomes
        quiescent.
        """
        group = self._groups.get(key)
        if group is None:
            return False
        group.writing.discard(rank)
        if not group.settled or group.writing:
            return False
        self._forget(key)
        return True

    def _forget(self, key: K) -> None:
        del self._groups[key]
        self._tombstones[key] = None
        while len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)


def _outcome(reports: list[Outcome], *, quiescent: bool) -> Outcome:
    failures = [report.reason for report in reports if not report.ok]
    # "cancelled" is what the others report after one rank failed; it is never the first cause.
    causes = [reason for reason in failures if reason != "cancelled"] or failures
    return Outcome(
        ok=not failures,
        reason=causes[0] if causes else "",
        quiescent=quiescent,
        nbytes=sum(report.nbytes for report in reports),
        descriptors=sum(report.descriptors for report in reports),
        reads=tuple(read for report in reports for read in report.reads),
    )
