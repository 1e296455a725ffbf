# SPDX-License-Identifier: Apache-2.0
"""Admission: a request gets a pair with room, waits in a bounded queue, or is rejected with 429.

Without it, requests beyond what the fleet can run wait inside the agents, and the first token of each comes
later than the last one's. The queue is bounded in length and in time, first come, first served per model.

`pump` reserves pairs synchronously on behalf of waiters, and is called by what frees slots. So no later
request can overtake, and a waiter that is cancelled has no reservation yet or releases the one it just got.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.routing.candidates import Slots
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import NoPair
from kvferry.proxy.telemetry.metrics import Metrics, ModelMetrics
from kvferry.proxy.wire.registration import Incarnation

MAX_RETRY_AFTER_S = 30

Route = Callable[[], Pair | NoPair]
Free = Callable[[Incarnation, int, bool], None]
"""Releases slots at an agent; the last argument says whether they are a pair's prefill leg's."""


class Reservation:
    """One attempt's slots at the agents of its pair, to be released once."""

    def __init__(self, pair: Pair, choices: int, free: Free) -> None:
        self.pair = pair
        self._free = free
        decode = pair.decode.info.incarnation
        self._slots = {decode: choices} if pair.alone else {pair.prefill.info.incarnation: 1, decode: choices}

    def acquire(self, slots: Slots) -> None:
        """Acquire the slots, and note when the prompt is computed, as predicted."""
        decode = self.pair.decode.info.incarnation
        for agent, count in self._slots.items():
            slots.acquire(agent, count, is_prefill=agent != decode)
        if self.pair.prediction is not None:
            slots.predicted[self.pair.prefill.info.incarnation] = self.pair.prediction

    def prefill_over(self) -> None:
        """Release the slot of the prefill leg, one of two, which has ended."""
        self._release(self.pair.prefill.info.incarnation)

    def release(self) -> None:
        """Release all slots that are left; the attempt has ended."""
        assert self._slots, "released twice"
        for agent in tuple(self._slots):
            self._release(agent)

    def slots(self) -> dict[Incarnation, int]:
        """Return the slots that are not released yet."""
        return dict(self._slots)

    def _release(self, agent: Incarnation) -> None:
        self._free(agent, self._slots.pop(agent), agent != self.pair.decode.info.incarnation)


@dataclass(slots=True, eq=False)
class _Waiter:
    request: RoutingRequest
    route: Route
    metrics: ModelMetrics
    since: float
    granted: asyncio.Future[Reservation | NoPair]


class Admission:
    """Admission of one proxy process.

    Args:
        max_waiting: Most requests that wait at once; 0 rejects those that cannot start at once.
    """

    def __init__(self, slots: Slots, metrics: Metrics, max_waiting: int) -> None:
        self._slots = slots
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._queues: dict[str, deque[_Waiter]] = {}
        self.waiting = 0
        """Requests in the queue; to be read only."""

    def waiting_for(self, model: str) -> list[RoutingRequest]:
        """Return the requests in the queue of one model, the first in front."""
        return [waiter.request for waiter in self._queues.get(model, ())]

    async def acquire(
        self, request: RoutingRequest, route: Route, *, by: float, first: bool = False
    ) -> Reservation | NoPair:
        """Wait for a pair with room and reserve its slots.

        Args:
            route: Chooses a pair; called again whenever slots may have become free.
            by: Deadline, on the event loop's clock.
            first: Goes before all others, whatever the queue's length: a request that was admitted before.

        Returns:
            The reservation, or why there is no pair to wait for.

        Raises:
            Overloaded: too many wait, or it waited too long.
        """
        if first or request.model not in self._queues:
            granted = self._grant(request, route)
            if granted is not NoPair.FULL:
                return granted
        if self.waiting >= self._max_waiting and not first:
            raise self._overloaded("queue_full", "all agents are busy, and too many requests wait for them")
        loop = asyncio.get_running_loop()
        metrics = self._metrics.of_model(request.model)
        waiter = _Waiter(request, route, metrics, loop.time(), loop.create_future())
        self._join(waiter, first)
        try:
            async with asyncio.timeout_at(by):
                return await self._granted(waiter)
        except TimeoutError:
            raise self._overloaded("queue_timeout", "all agents were busy for too long") from None
        finally:
            metrics.queue_wait.observe(loop.time() - waiter.since)

    def free(self, agent: Incarnation, count: int, is_prefill: bool) -> None:
        """Release slots, and admit waiting requests that fit now."""
        self._slots.release(agent, count, is_prefill=is_prefill)
        if self._queues:
            self.pump()

    def pump(self) -> None:
        """Admit all waiting requests that fit now; to be called when an agent has pinged or has less to do.

        Raises nothing: the failure of one request is raised where that one waits.
        """
        for queue in tuple(self._queues.values()):
            # One that was cancelled but has not run since is still in the queue.
            while (head := next((each for each in queue if not each.granted.done()), None)) is not None:
                try:
                    granted = self._grant(head.request, head.route)
                except Exception as error:  # noqa: BLE001 (it is raised where its request waits, not here)
                    self._leave(head)
                    head.granted.set_exception(error)
                    continue
                if granted is NoPair.FULL:
                    break
                self._leave(head)
                head.granted.set_result(granted)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an empty queue is left, or the count of those that wait is wrong."""
        assert all(self._queues.values()), "an empty queue is left"
        assert self.waiting == sum(map(len, self._queues.values())), "not all that wait are counted"

    async def _granted(self, waiter: _Waiter) -> Reservation | NoPair:
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._leave(waiter)
                self.pump()
            elif waiter.granted.exception() is None:
                granted = waiter.granted.result()
                if isinstance(granted, Reservation):
                    granted.release()
            raise

    def _grant(self, request: RoutingRequest, route: Route) -> Reservation | NoPair:
        pair = route()
        if isinstance(pair, NoPair):
            return pair
        reservation = Reservation(pair, request.n, self.free)
        reservation.acquire(self._slots)
        return reservation

    def _join(self, waiter: _Waiter, first: bool) -> None:
        queue = self._queues.setdefault(waiter.request.model, deque())
        if first:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        self.waiting += 1
        self._metrics.queue_length.add(waiter.metrics.model, 1)

    def _leave(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.request.model]
        queue.remove(waiter)
        if not queue:
            del self._queues[waiter.request.model]
        self.waiting -= 1
        self._metrics.queue_length.add(waiter.metrics.model, -1)

    def _overloaded(self, reason: str, message: str) -> Overloaded:
        """Count a rejection; its `Retry-After` is how long the first in the queue has been waiting."""
        self._metrics.rejections.labels(reason).inc()
        now = asyncio.get_running_loop().time()
        longest = max((now - queue[0].since for queue in self._queues.values()), default=0.0)
        return Overloaded(message, retry_after_s=min(max(1, math.ceil(longest)), MAX_RETRY_AFTER_S))
