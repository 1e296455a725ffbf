# SPDX-License-Identifier: Apache-2.0
"""What agents report of their KV transfers and prefix caches, added up over the fleet and by pair.

An agent reports totals since its own start; here they are added up from when this proxy first heard them, so
that neither an agent's restart nor this proxy's shows as a burst or a fall. In bounded memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.proxy.telemetry.metrics import Totals
from kvferry.proxy.wire.registration import (
    PULL_BUCKETS,
    Bye,
    Incarnation,
    LinkUse,
    Register,
    WorkReport,
)

MAX_AGENTS = 4096
MAX_PAIRS = 2048
MAX_REASONS = 64
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairUse:
    """What one agent (`consumer`) has pulled from another since it started, and when this last grew."""

    producer: str
    """Its address; its incarnation where this proxy does not know it."""
    consumer: str
    use: LinkUse
    at: float


class TransferTotals:
    """The sum over all agents.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: OrderedDict[Incarnation, WorkReport] = OrderedDict()
        """What each agent has reported; who has not pinged for longest is first."""
        self._addresses: OrderedDict[Incarnation, str] = OrderedDict()
        self._pairs: OrderedDict[tuple[Incarnation, Incarnation], PairUse] = OrderedDict()
        self._sum = Totals(pulls=[0] * (len(PULL_BUCKETS) + 1))
        self._failures: Counter[str] = Counter()

    def note(self, update: Register | Bye) -> None:
        """Take what a ping reports."""
        if isinstance(update, Bye):
            return
        agent = update.incarnation
        _put(self._addresses, agent, update.location, MAX_AGENTS)
        if update.work is None:
            _put(self._last, agent, self._last.get(agent, WorkReport()), MAX_AGENTS)  # it has not begun
            return
        before = self._last.get(agent, update.work)
        _put(self._last, agent, update.work, MAX_AGENTS)
        if update.work == before:
            return
        self._add(before, update.work)
        links = {link.producer: link for link in before.links}
        for link in update.work.links:
            if link != links.get(link.producer):
                pair = PairUse(producer="", consumer=update.location, use=link, at=self._clock())
                _put(self._pairs, (link.producer, agent), pair, MAX_PAIRS)

    def totals(self) -> Totals:
        """Return what all agents have counted, as the charts show it."""
        return self._sum

    def failures(self) -> dict[str, int]:
        """Return failed pulls by reason, the most frequent first."""
        return dict(self._failures.most_common())

    def pairs(self, most: int) -> list[PairUse]:
        """Return the pairs between which KV has moved, the last used first."""
        return [
            PairUse(
                producer=self._addresses.get(producer, producer),
                consumer=pair.consumer,
                use=pair.use,
                at=pair.at,
            )
            for (producer, _), pair in list(reversed(self._pairs.items()))[:most]
        ]

    @property
    def num_pairs(self) -> int:
        return len(self._pairs)

    def _add(self, before: WorkReport, work: WorkReport) -> None:
        """Add what an agent has done since its last ping; a number that falls adds nothing."""
        for reason, count in work.failures.items():
            known = reason in self._failures or len(self._failures) < MAX_REASONS
            self._failures[reason if known else OTHER] += max(0, count - before.failures.get(reason, 0))
        self._sum = self._sum.plus(
            Totals(
                pulls=[max(0, now - then) for now, then in zip(_counts(work), _counts(before), strict=True)],
                pull_bytes=max(0, work.pull_bytes - before.pull_bytes),
                pull_failures=max(0, sum(work.failures.values()) - sum(before.failures.values())),
                recomputes=max(0, work.recomputes - before.recomputes),
                leases_expired=max(0, work.leases_expired - before.leases_expired),
                prompt_tokens=max(0, work.prompt_tokens - before.prompt_tokens),
                cached_tokens=max(0, work.cached_tokens - before.cached_tokens),
            )
        )


def _counts(work: WorkReport) -> tuple[int, ...]:
    missing = len(PULL_BUCKETS) + 1 - len(work.pulls)
    return (*work.pulls, *[0] * missing)


def _put(table: OrderedDict[Any, Any], key: object, value: object, most: int) -> None:
    """Put an entry last; the first one makes room."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        table.popitem(last=False)
