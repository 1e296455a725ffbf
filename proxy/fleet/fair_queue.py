# SPDX-License-Identifier: Apache-2.0
"""The order of the requests of one model that wait.

1. Those of the lowest `priority` go first.
2. Among these, API keys share by work, in tokens: start-time fair queueing (docs/sources.md#fair-queueing).
   Each key has a virtual start time, to which the work of every request that is admitted is added; the key
   with the least is next. The start time of the request that was admitted last is the virtual time. A key
   that did not wait begins there, so it neither saves anything up nor waits for those that flood.
3. Of one key, the request with the least `order` is next: its deadline, and equals as they came.

A key is kept while it waits, and until the virtual time has reached its own. Nothing is kept of a priority of
which no request waits. To add, remove and find the head takes O(log n) comparisons of n requests
and one of each priority; to find the longest flow takes one of each key.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, count
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """A request that waits. `order`: unique among those of its key and priority."""

    priority: float
    key: bytes
    order: tuple[float, int]


W = TypeVar("W", bound=Waiter)
_BY_ORDER = attrgetter("order")


class _Class(Generic[W]):
    """The requests of one priority."""

    def __init__(self) -> None:
        self.flows: dict[bytes, list[W]] = {}
        """The requests of each key, in order."""
        self.num_waiting = 0
        self._by_start: list[tuple[float, int, bytes]] = []
        """A heap of the flows, by virtual start times."""
        self._virtual_time = 0.0
        self._numbers = count()

    def add(self, waiter: W) -> None:
        flow = self.flows.get(waiter.key)
        if flow is None:
            flow = self.flows[waiter.key] = []
            heapq.heappush(self._by_start, (self._virtual_time, next(self._numbers), waiter.key))
        insort(flow, waiter, key=_BY_ORDER)
        self.num_waiting += 1

    def head(self) -> W:
        while not (flow := self.flows[self._by_start[0][2]]):
            self._virtual_time, _, gone = heapq.heappop(self._by_start)
            del self.flows[gone]
        return flow[0]

    def remove(self, waiter: W, work: float | None) -> None:
        flow = self.flows[waiter.key]
        del flow[bisect_left(flow, waiter.order, key=_BY_ORDER)]
        self.num_waiting -= 1
        if work is not None:
            start, _, key = self._by_start[0]
            assert key == waiter.key, "admitted out of turn"
            self._virtual_time = start
            heapq.heapreplace(self._by_start, (start + work, next(self._numbers), key))


class FairQueue(Generic[W]):
    """See the module."""

    def __init__(self) -> None:
        self._classes: dict[float, _Class[W]] = {}

    def __len__(self) -> int:
        return sum(each.num_waiting for each in self._classes.values())

    def __iter__(self) -> Iterator[W]:
        """Yield all, in no order."""
        for each in self._classes.values():
            yield from chain.from_iterable(each.flows.values())

    def add(self, waiter: W) -> None:
        """Let a request wait."""
        self._classes.setdefault(waiter.priority, _Class()).add(waiter)

    def head(self) -> W:
        """Return the next one; there must be one. Keys that are no longer kept are dropped."""
        return self._classes[min(self._classes)].head()

    def remove(self, waiter: W, work: float | None = None) -> None:
        """Remove a request: the head is admitted with so much work, or any leaves without."""
        of_priority = self._classes[waiter.priority]
        of_priority.remove(waiter, work)
        if not of_priority.num_waiting:
            del self._classes[waiter.priority]

    def flow(self, waiter: W) -> list[W]:
        """Return the requests of the same key and priority that wait, in order; not to be changed."""
        of_priority = self._classes.get(waiter.priority)
        return [] if of_priority is None else of_priority.flows.get(waiter.key, [])

    def longest(self) -> list[W]:
        """Return the longest flow of the least urgent; its last one is evicted first. Not to be changed."""
        return max(self._classes[max(self._classes)].flows.values(), key=len)
