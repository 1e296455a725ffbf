# SPDX-License-Identifier: Apache-2.0
"""Admission: a request gets a pair with room, waits in a bounded queue, or is rejected with 429.

Without it, requests beyond what the fleet can run wait inside the agents, and the first token of each comes
later than the last one's. The queue is bounded in length and in time. `FairQueue` orders the requests of a
model: first come, first served, unless clients have priorities, keys or objectives of their own.

`pump` reserves pairs synchronously on behalf of waiters, and is called by what frees slots. So no later
request can overtake, and a waiter that is cancelled has no reservation yet or releases the one it just got.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.fair_queue import FairQueue
from kvferry.proxy.fleet.routing.candidates import Slots
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import NoPair
from kvferry.proxy.objectives import DEFAULT, ModelObjectives
from kvferry.proxy.telemetry.metrics import Metrics, ModelMetrics
from kvferry.proxy.wire.registration import Incarnation

MAX_RETRY_AFTER_S = 30
MAX_WORK = 1e9
"""Most tokens that a request counts as; what agents report of answers may be anything."""

Route = Callable[[], Pair | NoPair]
"""Chooses a pair. Raises `Overloaded` for a request that is to be rejected."""
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
        for agent, number in self._slots.items():
            slots.acquire(agent, number, is_prefill=agent != decode)
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
    priority: float
    key: bytes
    order: tuple[float, int]
    is_waiting: bool = True


class Admission:
    """Admission of one proxy process.

    Args:
        max_waiting: Most requests that wait at once; 0 rejects those that cannot start at once.
        objectives: Of requests without their own.
    """

    def __init__(
        self, slots: Slots, metrics: Metrics, max_waiting: int, objectives: ModelObjectives = DEFAULT
    ) -> None:
        self._slots = slots
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._objectives = objectives
        self._queues: dict[str, FairQueue[_Waiter]] = {}
        self._numbers = count()
        self.waiting = 0
        """Requests in the queue; to be read only."""

    def waiting_for(self, model: str) -> Iterator[RoutingRequest]:
        """Yield the requests in the queue of one model, in no order."""
        return (waiter.request for waiter in self._queues.get(model, ()))

    async def acquire(
        self,
        request: RoutingRequest,
        route: Route,
        *,
        by: float,
        first: bool = False,
        reject_at: float = math.inf,
    ) -> Reservation | NoPair:
        """Wait for a pair with room and reserve its slots.

        Args:
            route: Chooses a pair; called again whenever slots may have become free.
            by: Deadline, on the event loop's clock.
            first: Goes before all others, whatever the queue's length: a request that was admitted before.
            reject_at: From when on the client does not want its first token any more.

        Returns:
            The reservation, or why there is no pair to wait for.

        Raises:
            Overloaded: too many wait, it waited too long, its first token is predicted to come after
                `reject_at`, or another request took its place in a full queue.
        """
        is_behind = not first and request.model in self._queues
        if not is_behind:
            granted = self._grant(request, route)
            if granted is not NoPair.FULL:
                return granted
        waiter = self._join(request, route, first, reject_at)
        metrics, loop = waiter.metrics, asyncio.get_running_loop()
        try:
            if is_behind and self._queues[request.model].head() is waiter:
                self.pump()
            async with asyncio.timeout_at(min(by, reject_at)):
                return await self._granted(waiter)
        except TimeoutError:
            if reject_at < by:
                raise self.too_late() from None
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
        for model, queue in tuple(self._queues.items()):
            while self._queues.get(model) is queue:
                head = queue.head()
                if head.granted.done():  # it was cancelled, and has not run since
                    self._leave(head)
                    continue
                try:
                    granted = self._grant(head.request, head.route)
                except Exception as error:  # noqa: BLE001 (it is raised where its request waits, not here)
                    self._leave(head)
                    head.granted.set_exception(error)
                    continue
                if granted is NoPair.FULL:
                    break
                self._leave(head, _work(head.request, granted))
                head.granted.set_result(granted)

    def too_late(self, late_s: float | None = None) -> Overloaded:
        """Count a rejection whose first token would come so many seconds too late; None if not known."""
        message = (
            "the first token would come later than the request's objective, and it is to be rejected then"
        )
        return self._overloaded("objective", message, late_s)

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

    def _join(self, request: RoutingRequest, route: Route, first: bool, reject_at: float) -> _Waiter:
        """Add a request to the queue. Raises `Overloaded`."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        metrics, since = self._metrics.of_model(request.model), loop.time()
        due = since + (request.ttft_s or self._objectives.of(request.model).ttft_s)
        waiter = _Waiter(
            request,
            route,
            metrics,
            since,
            loop.create_future(),
            priority=-math.inf if first else request.priority,
            key=b"" if first else request.key,
            order=(0.0, -number) if first else (due, number),
        )
        queue = self._queues.get(request.model, FairQueue[_Waiter]())
        flow = queue.flow(waiter)
        if flow and flow[0].order < waiter.order and since + (since - flow[0].since) > reject_at:
            raise self.too_late(since + (since - flow[0].since) - reject_at)
        if self.waiting >= self._max_waiting and not first:
            self._evict_for(waiter, len(flow))
        self._queues[request.model] = queue
        queue.add(waiter)
        self.waiting += 1
        self._metrics.queue_length.add(metrics.model, 1)
        return waiter

    def _evict_for(self, waiter: _Waiter, num_own: int) -> None:
        """Reject another request: of the key with most of the least urgent ones that wait.

        Raises `Overloaded` where this one would be the next to be evicted.
        """
        message = "all agents are busy, and too many requests wait for them"
        flow = max(
            (queue.longest() for queue in self._queues.values()),
            key=lambda flow: (flow[-1].priority, len(flow)),
            default=None,
        )
        if flow is None or (flow[-1].priority, len(flow)) <= (waiter.priority, num_own + 1):
            raise self._overloaded("queue_full", message)
        last = flow[-1]
        self._leave(last)
        if not last.granted.done():
            last.granted.set_exception(self._overloaded("queue_full", message))

    def _leave(self, waiter: _Waiter, work: float | None = None) -> None:
        if not waiter.is_waiting:
            return
        waiter.is_waiting = False
        queue = self._queues[waiter.request.model]
        queue.remove(waiter, work)
        if not queue:
            del self._queues[waiter.request.model]
        self.waiting -= 1
        self._metrics.queue_length.add(waiter.metrics.model, -1)

    def _overloaded(self, reason: str, message: str, retry_after_s: float | None = None) -> Overloaded:
        """Count a rejection. By default, its `Retry-After` is how long the first of those that would be
        evicted has been waiting.
        """
        self._metrics.rejections.labels(reason).inc()
        if retry_after_s is None:
            now = asyncio.get_running_loop().time()
            retry_after_s = max(
                (now - queue.longest()[0].since for queue in self._queues.values()), default=0.0
            )
        seconds = min(max(1.0, retry_after_s), MAX_RETRY_AFTER_S)
        return Overloaded(message, retry_after_s=math.ceil(seconds))


def _work(request: RoutingRequest, granted: Reservation | NoPair) -> float | None:
    """Return the tokens that a request counts as: of its prompts, and of its answers as long as most are."""
    if not isinstance(granted, Reservation):
        return None
    answer = granted.pair.decode.speed.answer_tokens
    if request.max_tokens is not None:
        answer = min(answer, request.max_tokens)
    return min(max(1.0, request.tokens + request.decoded_sequences * answer), MAX_WORK)
