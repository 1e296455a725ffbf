# SPDX-License-Identifier: Apache-2.0
"""The one process of a proxy with `--workers` that keeps the truth about the fleet, as seen by its workers.

Workers take clients' requests and talk to agents; which agents, they ask here, one round trip per attempt.
So limits, queues, turns, breakers and drains are those of a proxy of one process: it is the same code. What
a worker holds goes back when its link ends, whatever the worker died of.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import LocalFleet, as_json
from kvferry.proxy.fleet.interface import AcquireRequest, Page, PageName
from kvferry.proxy.fleet.overview import overview
from kvferry.proxy.fleet.router import NoPair
from kvferry.proxy.fleet.slots import Slots
from kvferry.proxy.telemetry import metrics
from kvferry.proxy.workers import reports
from kvferry.proxy.workers.link import Link, LinkLost
from kvferry.proxy.workers.link_messages import (
    Collect,
    Doubt,
    Drain,
    Enter,
    Entered,
    Failed,
    Free,
    Leave,
    Listening,
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
from kvferry.proxy.workers.reports import Report, Reports

logger = logging.getLogger(__name__)

COLLECT_TIMEOUT_S = 2.0
"""For a worker's report; one that is late is shown as it was last time."""
WATCH_INTERVAL_S = 2.0
MAX_MISSED = 4
"""Reports in a row; then a worker is taken for hung and replaced."""

WorkerLink = Link[ToWorker, ToHub]


class Hub:
    """Serves the workers of one proxy."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet
        self._reports = Reports()
        self._workers: set[WorkerSeat] = set()
        self._stopping = False

    async def serve(self, link: WorkerLink, listening: asyncio.Event) -> None:
        """Serve one worker until its link ends. `listening` is set when it takes requests."""
        seat = WorkerSeat(link, self._fleet, self, listening)
        self._workers.add(seat)
        if self._stopping:
            seat.stop()
        try:
            await seat.serve()
        finally:
            self._workers.discard(seat)
            self._reports.end(seat)
            seat.release()

    def stop(self) -> None:
        """Tell every worker, also one that is yet to come, to finish what it has and end."""
        self._stopping = True
        for seat in self._workers:
            seat.stop()

    def pass_on(self, spent: Spent, teller: WorkerSeat) -> None:
        """Let the other workers know."""
        for seat in self._workers - {teller}:
            seat.tell(spent)

    def keep(self, seat: WorkerSeat, report: Report) -> None:
        """Remember what a worker has counted."""
        if seat in self._workers:
            self._reports.keep(seat, report)

    async def page(self, name: PageName) -> Page:
        """See `Fleet`. What workers have counted is in it."""
        if name not in ("metrics", "live"):
            return await self._fleet.page(name)
        await self._collect()
        families = self._reports.families()
        if name == "metrics":
            return Page(body=reports.exposition(families), content_type=metrics.CONTENT_TYPE)
        now = self._fleet.clock()
        snapshot = self._fleet.registry.snapshot(now)
        in_flight = reports.in_flight(families)
        return as_json(overview(snapshot, self._fleet.slots, in_flight, self._reports.history(), now))

    async def _collect(self) -> None:
        """Ask every worker at once, and this process too, for what they have counted."""
        fleet = self._fleet
        own = Report(families=reports.families_of(fleet.metrics.collect()), history=fleet.history.state())
        self._reports.keep(self, own)
        seats = tuple(self._workers)
        answers = await asyncio.gather(*(seat.report() for seat in seats))
        for seat, report in zip(seats, answers, strict=True):
            if report is not None:
                self.keep(seat, report)


class WorkerSeat:
    """One worker as the hub sees it: what it waits for, and what it holds."""

    def __init__(self, link: WorkerLink, fleet: LocalFleet, hub: Hub, listening: asyncio.Event) -> None:
        self._link = link
        self._fleet = fleet
        self._hub = hub
        self._listening = listening
        self._held = Slots()
        self._entering: dict[int, asyncio.Task[None]] = {}
        self._seq = itertools.count()
        self._collecting: dict[int, asyncio.Future[Report]] = {}

    async def serve(self) -> None:
        """Take the worker's messages until it is gone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                while True:
                    if (work := self._take(await self._link.receive())) is not None:
                        seq, answering = work
                        task = tasks.create_task(answering)
                        if seq is not None:
                            self._entering[seq] = task
        except* LinkLost as lost:
            # Leaving the group has cancelled whatever was being done for it.
            logger.info("a worker has ended: %s", lost.exceptions[0])
        finally:
            self._link.close()

    async def _watch(self) -> None:
        """Keep its latest report, so that little is lost with it; one that stays silent is given up."""
        missed = 0
        while missed < MAX_MISSED:
            await asyncio.sleep(WATCH_INTERVAL_S)
            report = await self.report()
            if report is not None:
                self._hub.keep(self, report)
            missed = 0 if report is not None else missed + 1
        raise LinkLost("it does not report any more")

    def stop(self) -> None:
        """Tell it to finish what it has and end."""
        self._link.send(Stop())

    def tell(self, spent: Spent) -> None:
        """Another worker has served a client."""
        self._link.send(spent)

    def release(self) -> None:
        """Free what it held when it ended."""
        for agent, count in self._held.taken().items():
            self._held.release(agent, count)
            self._fleet.admission.free(agent, count)

    async def report(self) -> Report | None:
        """What it has counted, or None if it does not say in time."""
        seq = next(self._seq)
        reported: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._collecting[seq] = reported
        self._link.send(Collect(seq=seq))
        try:
            async with asyncio.timeout(COLLECT_TIMEOUT_S):
                return await reported
        except TimeoutError:
            return None
        finally:
            del self._collecting[seq]

    def _take(self, message: ToHub) -> tuple[int | None, Coroutine[None, None, None]] | None:
        """Act on a message. What takes time is returned, with the `seq` by which it can be called off."""
        match message:
            case Enter(seq=seq):
                return seq, self._enter(message)
            case Show(seq=seq, name=name):
                return None, self._show(seq, name)
            case Drain():
                return None, self._drain(message)
            case Doubt():
                return None, self._doubt(message)
            case Leave(seq=seq):
                if (entering := self._entering.pop(seq, None)) is not None:
                    entering.cancel()
            case Free(agent=agent, count=count):
                self._held.release(agent, count)
                self._fleet.admission.free(agent, count)
            case Refused(agent=agent):
                self._fleet.connection_refused(agent)
            case Succeeded(agent=agent):
                self._fleet.leg_succeeded(agent)
            case Failed(agent=agent):
                self._fleet.leg_failed(agent)
            case Reported(seq=seq, report=report):
                if (reported := self._collecting.get(seq)) is not None and not reported.done():
                    reported.set_result(report)
            case Spent():
                self._hub.pass_on(message, self)
            case Listening():
                self._listening.set()
        return None

    async def _enter(self, message: Enter) -> None:
        call = AcquireRequest(
            ask=message.ask,
            by=self._fleet.clock() + message.wait_s,
            exclude=message.exclude,
            must_match=message.must_match,
        )
        try:
            answer = await self._fleet.enter(call)
        except Overloaded as full:
            turned = TurnedAway(seq=message.seq, message=full.message, retry_after_s=full.retry_after_s)
            self._link.send(turned)
            return
        except Exception:
            logger.exception("a request could not be judged")
            self._link.send(Unanswered(seq=message.seq))
            return
        finally:
            self._entering.pop(message.seq, None)
        if isinstance(answer, NoPair):
            self._link.send(NotEntered(seq=message.seq, why=answer))
        else:
            self._let_in(message, answer)

    def _let_in(self, message: Enter, hold: Reservation) -> None:
        """The hold is the worker's from here on."""
        for agent, count in hold.slots().items():
            self._held.take(agent, count)
        self._link.send(Entered(seq=message.seq, pair=hold.pair, choices=message.ask.n))

    async def _show(self, seq: int, name: PageName) -> None:
        self._link.send(Shown(seq=seq, page=await self._hub.page(name)))

    async def _doubt(self, message: Doubt) -> None:
        self._link.send(Lost(seq=message.seq, agents=await self._fleet.find_lost(message.agents)))

    async def _drain(self, message: Drain) -> None:
        page = await self._fleet.drain(message.agent, message.drained)
        self._link.send(Shown(seq=message.seq, page=page))
