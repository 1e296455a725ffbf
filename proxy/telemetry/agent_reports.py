# SPDX-License-Identifier: Apache-2.0
"""What agents report in their pings, kept for the operator's page: each agent's last hour, and what all have
done with their KV transfers and prefix caches, added up over the fleet and by pair.

Of each slice of an agent's hour the first ping is stored, into arrays that are made once per agent: KV use,
what runs and what waits. Of its work an agent reports totals since its own start; here they are added up from
when this proxy first heard them, so that neither an agent's restart nor this proxy's shows as a burst or a
fall. Most pings cost next to nothing. In bounded memory: 3 KB an agent.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.proxy.telemetry.history import HOUR_SLICE_S, NUM_HOUR_SLICES, NUM_SLICES, SLICE_S
from kvferry.proxy.telemetry.metrics import Totals
from kvferry.proxy.wire.registration import (
    PULL_BUCKETS,
    Bye,
    Incarnation,
    LinkUse,
    Load,
    Register,
    WorkReport,
)

MAX_AGENTS = 4096
MAX_PAIRS = 2048
MAX_REASONS = 64
OTHER = "other"
_VALUES = ("running", "waiting", "kv_used", "kv_leased")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairUse:
    """What one agent (`consumer`) has pulled from another since it started, and when this last grew."""

    producer: str
    """Its address; its incarnation where this proxy does not know it."""
    consumer: str
    use: LinkUse
    at: float


class _Window:
    """One agent's latest slices: of each, what the first ping in it said; nothing where none came."""

    __slots__ = ("_newest", "_num", "_rows", "_slice_s")

    def __init__(self, slice_s: float, num_slices: int) -> None:
        self._slice_s = slice_s
        self._num = num_slices
        self._rows = array("f", [math.nan]) * (num_slices * len(_VALUES))
        self._newest = 0
        """The number of the slice that was written last."""

    def put(self, now: float, load: Load) -> None:
        number = int(now / self._slice_s)
        if number == self._newest:
            return
        if number > self._newest + 1:
            self._clear(self._newest + 1, number)
        self._newest = number
        start = number % self._num * len(_VALUES)
        self._rows[start : start + len(_VALUES)] = _row(load)

    def _clear(self, first: int, end: int) -> None:
        """Forget slices in which no ping came."""
        for number in range(max(first, end - self._num), end):
            start = number % self._num * len(_VALUES)
            self._rows[start : start + len(_VALUES)] = _NOTHING

    def charts(self, now: float) -> dict[str, Any]:
        """Return a value, or None, per slice, oldest first."""
        last = int(now / self._slice_s)
        starts = [
            number % self._num * len(_VALUES) if number <= self._newest else None
            for number in range(last - self._num + 1, last + 1)
        ]
        return {
            "slice_s": self._slice_s,
            **{
                name: [None if start is None else _shown(self._rows[start + offset]) for start in starts]
                for offset, name in enumerate(_VALUES)
            },
        }


_NOTHING = array("f", [math.nan] * len(_VALUES))


@dataclass(slots=True, eq=False)
class _Agent:
    """What one agent has reported last, and in its latest slices."""

    address: str
    minutes: _Window
    hour: _Window
    work: WorkReport | None = None


class AgentReports:
    """What the agents have reported that pinged last.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._agents: OrderedDict[Incarnation, _Agent] = OrderedDict()
        """Who has not pinged for longest is first."""
        self._pairs: OrderedDict[tuple[Incarnation, Incarnation], PairUse] = OrderedDict()
        self._sum = Totals(pulls=[0] * (len(PULL_BUCKETS) + 1))
        self._failures: Counter[str] = Counter()

    def note(self, update: Register | Bye) -> None:
        """Take what a ping reports."""
        if isinstance(update, Bye):
            return
        agent = self._agents.get(update.incarnation)
        if agent is None:
            minutes, hour = _Window(SLICE_S, NUM_SLICES), _Window(HOUR_SLICE_S, NUM_HOUR_SLICES)
            self._agents[update.incarnation] = agent = _Agent(update.location, minutes, hour)
            if len(self._agents) > MAX_AGENTS:
                self._agents.popitem(last=False)
        else:
            self._agents.move_to_end(update.incarnation)
        now, agent.address = self._clock(), update.location
        agent.minutes.put(now, update.load)
        agent.hour.put(now, update.load)
        before, work = agent.work, update.work
        if work is None:  # it has not begun
            agent.work = before or WorkReport()
            return
        agent.work = work
        if before is not None and work != before:
            self._add(before, work)
            self._note_links(update, before, work, now)

    def charts(self, agent: Incarnation) -> dict[str, Any]:
        """Return an agent's windows, named as those of `History` are; none of one that is not remembered."""
        found, now = self._agents.get(agent), self._clock()
        if found is None:
            return {}
        return {"charts": found.minutes.charts(now), "hour": found.hour.charts(now)}

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
                producer=known.address if (known := self._agents.get(producer)) else producer,
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

    def _note_links(self, agent: Register, before: WorkReport, work: WorkReport, now: float) -> None:
        links = {link.producer: link for link in before.links}
        for link in work.links:
            if link != links.get(link.producer):
                pair = link.producer, agent.incarnation
                self._pairs[pair] = PairUse(producer="", consumer=agent.location, use=link, at=now)
                self._pairs.move_to_end(pair)
                if len(self._pairs) > MAX_PAIRS:
                    self._pairs.popitem(last=False)


def _counts(work: WorkReport) -> tuple[int, ...]:
    missing = len(PULL_BUCKETS) + 1 - len(work.pulls)
    return (*work.pulls, *[0] * missing)


def _row(load: Load) -> array[float]:
    total = load.kv_blocks_total
    used, leased = total - load.kv_blocks_free, load.kv_blocks_leased
    shares = (used / total, leased / total) if total > 0 else (math.nan, math.nan)
    return array("f", (load.running, load.waiting, *shares))


def _shown(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
