# SPDX-License-Identifier: Apache-2.0
"""All parts of one attempt with another engine's servers, side by side, as one answer or one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NoReturn

from kvferry.proxy.dialects.base import SubRequest
from kvferry.proxy.errors import AgentLost, AgentRejected, AgentTimeout, BadResponse, ProxyError, StreamBroken
from kvferry.proxy.exchange.funnel import BoundedQueue
from kvferry.proxy.exchange.legs import Put, SubRequestLegs, Tools
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.exchange.sub_requests import SubResponse, closing_events, merge
from kvferry.proxy.fleet.admission import Reservation

WAITING_EVENTS = 64
"""Pieces that may wait for a slow client, of all parts together; past that the servers wait too."""


class Spread:
    """The parts of one attempt. Call either `answer` or `events`, once.

    One part's failure ends them all: an answer is whole or it is none. Before anything was given to the
    client a lost server is an `AgentLost`, after which another pair may be asked; later it is `StreamBroken`,
    for these engines cannot continue what another has begun.
    """

    def __init__(
        self, tools: Tools, hold: Reservation, record: RequestLog, subs: Sequence[SubRequest]
    ) -> None:
        self._tools = tools
        self._hold = hold
        self._record = record
        self._subs = subs
        self._in_prefill = len(subs)

    async def answer(self) -> bytes:
        """The client's whole answer. Raises `ProxyError`."""
        return merge(await self._run(_nowhere))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The client's events up to `[DONE]`, each item one or more whole ones. Raises `ProxyError`."""
        funnel, begun = BoundedQueue(WAITING_EVENTS), False
        running = asyncio.get_running_loop().create_task(self._run(funnel.put))
        running.add_done_callback(lambda _: funnel.close())
        try:
            async for events in funnel:
                if not begun:
                    begun = True
                    self._prefill_seen_over()
                    self._record.enter(Phase.DECODE)
                yield events
            yield closing_events(await running)
        except AgentLost as lost:
            if begun:
                raise StreamBroken(lost.message) from lost
            raise
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _run(self, put: Put) -> list[SubResponse]:
        """Every part's answer, in order. Raises the `ProxyError` that says most."""
        self._record.enter(Phase.DECODE_WAIT if self._hold.pair.alone else Phase.PREFILL)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._serve(sub, put)) for sub in self._subs]
        except BaseExceptionGroup as failures:
            if failures.subgroup((AgentLost, AgentTimeout, BadResponse)):
                self._tools.kv_endpoints.forget(self._hold.pair.prefill.incarnation)
            _raise_one(failures)
        return [task.result() for task in tasks]

    async def _serve(self, sub: SubRequest, put: Put) -> SubResponse:
        legs, pair = SubRequestLegs(self._tools, sub, put, self._prefilled), self._hold.pair
        if pair.alone:
            return await legs.run_alone(pair.prefill.info)
        return await legs.run(pair.prefill.info, pair.decode.info)

    def _prefilled(self) -> None:
        """One more part's prefill leg has ended well."""
        self._in_prefill -= 1
        if not self._in_prefill:
            self._prefill_seen_over()
            self._hold.prefill_over()

    def _prefill_seen_over(self) -> None:
        """The client waits for prefill no more: all parts have had theirs, or one has an event already."""
        if self._record.phase is Phase.PREFILL:
            self._record.enter(Phase.DECODE_WAIT)


async def _nowhere(events: bytes) -> None:
    """Where the events of an answer go that has none."""
    raise AssertionError("an answer that is not streamed has no events")


def _raise_one(failures: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the one failure that the client is told: an engine's verdict on the request, else the first.

    A defect of our own is raised as it is, in its group.
    """
    ours, others = failures.split(ProxyError)
    if others is not None or ours is None:
        raise failures
    verdicts = ours.subgroup(AgentRejected)
    raise _first(verdicts or ours) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
