# SPDX-License-Identifier: Apache-2.0
"""A worker's view of the fleet: everything is asked of, or told to, the hub (`fleet.Fleet`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from kvferry.proxy.errors import NoAgent, Overloaded, ProxyError
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.interface import AcquireRequest, Page, PageName
from kvferry.proxy.fleet.router import NoPair
from kvferry.proxy.wire.messages import Incarnation, Register
from kvferry.proxy.workers.link import Link, LinkLost
from kvferry.proxy.workers.link_messages import (
    Begin,
    Collect,
    Doubt,
    Drain,
    Enter,
    Entered,
    Failed,
    Free,
    Leave,
    Lost,
    NotEntered,
    Refused,
    Reported,
    Show,
    Shown,
    Spent,
    Stop,
    Succeeded,
    ToHub,
    ToWorker,
    TurnedAway,
    Unanswered,
)
from kvferry.proxy.workers.reports import Report

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""For the hub's answer, beyond any wait that was asked for."""

HubLink = Link[ToHub, ToWorker]
Answer = Entered | NotEntered | TurnedAway | Unanswered | Shown | Lost
A = TypeVar("A", bound=Answer)


class RemoteFleet:
    """The client of the hub.

    Args:
        report: What this worker has counted so far.
        chunks: Whether a policy of this proxy looks at the beginnings of prompts.
        spent: Told what clients took from other workers.
    """

    def __init__(
        self,
        link: HubLink,
        report: Callable[[], Report],
        *,
        chunks: bool,
        spent: Callable[[Spent], None] = lambda spent: None,
    ) -> None:
        self._link = link
        self._report = report
        self._chunks = chunks
        self._spent = spent
        self._seq = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.stopped = asyncio.Event()
        """The hub has told this worker to stop, or has ended."""
        self.lost = False
        """The hub has ended."""

    async def listen(self) -> None:
        """Take the hub's messages until it ends."""
        try:
            while True:
                self._take(await self._link.receive())
        except LinkLost as lost:
            logger.error("the hub has ended: %s", lost)
        self.lost = True
        self.stopped.set()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(NoAgent("the proxy's hub has ended"))

    def _take(self, message: ToWorker) -> None:
        match message:
            case Stop():
                self.stopped.set()
            case Collect(seq=seq):
                self._link.send(Reported(seq=seq, report=self._report()))
            case Spent():
                self._spent(message)
            case Begin():
                raise AssertionError("the hub begins twice")
            case _:
                self._answered(message)

    async def enter(self, call: AcquireRequest) -> Reservation | NoPair:
        """See `Fleet`."""
        wait_s = max(0.0, call.by - asyncio.get_running_loop().time())
        seq = next(self._seq)
        question = Enter(
            seq=seq,
            ask=call.ask.condensed(chunks=self._chunks),
            wait_s=wait_s,
            exclude=call.exclude,
            must_match=call.must_match,
        )
        try:
            answer = await self._ask(seq, question, wait_s + ANSWER_TIMEOUT_S)
        except (TimeoutError, asyncio.CancelledError) as gone:
            self._link.send(Leave(seq=seq))
            if isinstance(gone, TimeoutError):
                self._nobody_can_tell()
            raise
        match answer:
            case Entered():
                return self._hold(answer)
            case NotEntered(why=why):
                return why
            case TurnedAway(message=message, retry_after_s=retry_after_s):
                raise Overloaded(message, retry_after_s=retry_after_s)
            case Unanswered():
                raise ProxyError("the proxy failed; its log says why")
            case Shown() | Lost():
                raise AssertionError("something else where a pair was asked for")

    def connection_refused(self, agent: Incarnation) -> None:
        """See `Fleet`."""
        self._link.send(Refused(agent=agent))

    def leg_succeeded(self, agent: Incarnation) -> None:
        """See `Fleet`."""
        self._link.send(Succeeded(agent=agent))

    def leg_failed(self, agent: Incarnation) -> None:
        """See `Fleet`."""
        self._link.send(Failed(agent=agent))

    async def find_lost(self, agents: Sequence[Register]) -> frozenset[Incarnation]:
        """See `Fleet`."""
        seq = next(self._seq)
        try:
            answer = await self._ask(seq, Doubt(seq=seq, agents=tuple(agents)), ANSWER_TIMEOUT_S)
        except TimeoutError:
            self._nobody_can_tell()
        assert isinstance(answer, Lost)
        return answer.agents

    async def page(self, name: PageName) -> Page:
        """See `Fleet`."""
        seq = next(self._seq)
        return await self._shown(seq, Show(seq=seq, name=name))

    async def drain(self, agent: Incarnation, drained: bool) -> Page:
        """See `Fleet`."""
        seq = next(self._seq)
        return await self._shown(seq, Drain(seq=seq, agent=agent, drained=drained))

    async def _shown(self, seq: int, question: Show | Drain) -> Page:
        try:
            answer = await self._ask(seq, question, ANSWER_TIMEOUT_S)
        except TimeoutError:
            self._nobody_can_tell()
        assert isinstance(answer, Shown)
        return answer.page

    async def _ask(self, seq: int, question: Enter | Show | Drain | Doubt, timeout_s: float) -> Answer:
        if self.lost:
            raise NoAgent("the proxy's hub has ended")
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = answered
        self._link.send(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        except (asyncio.CancelledError, TimeoutError):
            # Let in at the very moment: nobody else will give this hold back.
            if answered.done() and not answered.cancelled() and answered.exception() is None:
                self._give_back(answered.result())
            raise
        finally:
            self._waiting.pop(seq, None)

    def _answered(self, answer: Answer) -> None:
        waiting = self._waiting.pop(answer.seq, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
        else:
            self._give_back(answer)

    def _give_back(self, answer: Answer) -> None:
        if isinstance(answer, Entered):
            self._hold(answer).release()

    def _hold(self, answer: Entered) -> Reservation:
        return Reservation(answer.pair, answer.choices, self._free)

    def _free(self, agent: Incarnation, count: int) -> None:
        self._link.send(Free(agent=agent, count=count))

    def _nobody_can_tell(self) -> NoReturn:
        raise NoAgent("the proxy's hub does not answer") from None
