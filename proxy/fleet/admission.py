# SPDX-License-Identifier: Apache-2.0
"""Lets a request in when agents have room, makes it wait a while when they have none, and else rejects it.

Without this, requests beyond what the fleet can run wait inside the agents, and the first token of each comes
later than the last one's. The queue is bounded in length and in time, first come, first served per model.

Places are given in `pump`, synchronously, on behalf of those who wait: whoever frees a place calls it. So
nobody who comes later can slip in between, and a waiter that is cancelled has either no place yet or gives
back the one that it was just given.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.load import Slots
from kvferry.proxy.fleet.router import NoPair, Pair
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Incarnation

MAX_RETRY_AFTER_S = 30

Question = Callable[[], Pair | NoPair]
Free = Callable[[Incarnation, int], None]
"""Gives back slots at an agent."""


class Reservation:
    """One attempt's slots at its agents, which must be given back once."""

    def __init__(self, pair: Pair, choices: int, free: Free) -> None:
        self.pair = pair
        self._give = free
        decode = pair.decode.incarnation
        self._slots = {decode: choices} if pair.alone else {pair.prefill.incarnation: 1, decode: choices}

    def prefill_over(self) -> None:
        """The prefill leg of two has ended: its agent may take another."""
        self._free(self.pair.prefill.incarnation)

    def release(self) -> None:
        """The attempt has ended."""
        assert self._slots, "given back twice"
        for agent in tuple(self._slots):
            self._free(agent)

    def slots(self) -> dict[Incarnation, int]:
        """What it still holds."""
        return dict(self._slots)

    def _free(self, agent: Incarnation) -> None:
        self._give(agent, self._slots.pop(agent))


@dataclass(slots=True, eq=False)
class _Waiter:
    ask: RoutingRequest
    question: Question
    since: float
    granted: asyncio.Future[Reservation | NoPair]


class Admission:
    """The door of one proxy.

    Args:
        max_waiting: Most requests that wait at once; 0 rejects whatever cannot start at once.
    """

    def __init__(self, slots: Slots, metrics: Metrics, max_waiting: int) -> None:
        self._slots = slots
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._queues: dict[str, deque[_Waiter]] = {}

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return sum(len(queue) for queue in self._queues.values())

    async def acquire(
        self, ask: RoutingRequest, question: Question, *, by: float, first: bool = False
    ) -> Reservation | NoPair:
        """Wait for a pair with room and take its slots.

        Args:
            question: Asks the router; asked again whenever places may have become free.
            by: When to give up, on the event loop's clock.
            first: Goes before all others and is never one too many: a request that was let in once already.

        Returns:
            The hold, or why there is no pair to wait for.

        Raises:
            Overloaded: too many wait, or it waited too long.
        """
        if first or ask.model not in self._queues:
            answer = self._grant(ask, question)
            if answer is not NoPair.FULL:
                return answer
        if self.waiting >= self._max_waiting and not first:
            raise self._overloaded("queue_full", "all agents are busy, and too many requests wait for them")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(ask, question, loop.time(), loop.create_future())
        self._join(waiter, first)
        try:
            async with asyncio.timeout_at(by):
                return await self._granted(waiter)
        except TimeoutError:
            raise self._overloaded("queue_timeout", "all agents were busy for too long") from None
        finally:
            self._metrics.queue_wait.observe(loop.time() - waiter.since)

    def free(self, agent: Incarnation, count: int) -> None:
        """Give back slots, and let in who can have them."""
        self._slots.release(agent, count)
        self.pump()

    def pump(self) -> None:
        """Let in all for whom there is room: to be called when an agent has spoken or has less to do.

        Raises nothing: what goes wrong with one request is raised where that one waits.
        """
        for queue in tuple(self._queues.values()):
            # One that was cancelled but has not run since is still in the queue.
            while (head := next((each for each in queue if not each.granted.done()), None)) is not None:
                try:
                    answer = self._grant(head.ask, head.question)
                except Exception as error:  # noqa: BLE001 (it is raised where its request waits, not here)
                    self._leave(head)
                    head.granted.set_exception(error)
                    continue
                if answer is NoPair.FULL:
                    break
                self._leave(head)
                head.granted.set_result(answer)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a queue is kept for nobody."""
        assert all(self._queues.values()), "an empty queue is left"

    async def _granted(self, waiter: _Waiter) -> Reservation | NoPair:
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._leave(waiter)
                self.pump()
            elif waiter.granted.exception() is None:
                answer = waiter.granted.result()
                if isinstance(answer, Reservation):
                    answer.release()
            raise

    def _grant(self, ask: RoutingRequest, question: Question) -> Reservation | NoPair:
        pair = question()
        if isinstance(pair, NoPair):
            return pair
        hold = Reservation(pair, ask.n, self.free)
        for agent, count in hold.slots().items():
            self._slots.acquire(agent, count)
        return hold

    def _join(self, waiter: _Waiter, first: bool) -> None:
        queue = self._queues.setdefault(waiter.ask.model, deque())
        if first:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        self._metrics.queue_length.set(self.waiting)

    def _leave(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.ask.model]
        queue.remove(waiter)
        if not queue:
            del self._queues[waiter.ask.model]
        self._metrics.queue_length.set(self.waiting)

    def _overloaded(self, reason: str, message: str) -> Overloaded:
        """A refusal that names, as the time to come back, how long the foremost has been waiting."""
        self._metrics.rejections.labels(reason).inc()
        now = asyncio.get_running_loop().time()
        longest = max((now - queue[0].since for queue in self._queues.values()), default=0.0)
        return Overloaded(message, retry_after_s=min(max(1, math.ceil(longest)), MAX_RETRY_AFTER_S))
