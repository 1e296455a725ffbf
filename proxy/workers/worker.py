# SPDX-License-Identifier: Apache-2.0
"""`python -m kvferry.proxy.workers.worker FD`: one of the processes that serve clients with `--workers`.

Started by the supervisor alone; `FD` is its end of their channel. A worker is a proxy of its own, with its
own fleet, admission, limits and circuit breakers; it learns the fleet from the supervisor instead of from
pings. It ends when the supervisor says so, or when the supervisor ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from kvferry.common.http.server import return_large_buffers, spare_full_collections
from kvferry.common.stop import StopRequest
from kvferry.common.telemetry.logs import configure_logging
from kvferry.proxy.api.operator.commands import OperatorApi, PageName
from kvferry.proxy.api.operator.pages import Page, timeline_page
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.errors import ProxyError
from kvferry.proxy.fleet.fleet import Fleet
from kvferry.proxy.server import open_services, serving
from kvferry.proxy.settings import Keys, fleet_settings, listening_socket, metrics_of
from kvferry.proxy.telemetry.agent_reports import AgentReports
from kvferry.proxy.telemetry.collectors import AgentCollector, ScalingCollector
from kvferry.proxy.telemetry.event_log import SEEN_BY_WORKERS
from kvferry.proxy.telemetry.history import FailureLog, History
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Timelines
from kvferry.proxy.wire.registration import Incarnation, Role
from kvferry.proxy.workers.messages import (
    HEARTBEAT_INTERVAL_S,
    AgentRequest,
    AgentStatus,
    ChannelClosed,
    Collect,
    CordonRequest,
    Departure,
    DrainRequest,
    FindTimeline,
    Forwarded,
    FoundTimeline,
    Heartbeat,
    Listening,
    MetricFamily,
    OperatorRequest,
    PageRequest,
    PageResponse,
    ProcessChannel,
    Registration,
    Report,
    RoleRequest,
    SetCordoned,
    Start,
    Stop,
    TimelineRequest,
    ToSupervisor,
    ToWorker,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
RESPONSE_TIMEOUT_S = 5.0
MAX_PENDING = 64
"""Operators' requests that wait for the supervisor at once; more are rejected."""
OF_ALL_WORKERS: frozenset[PageName] = frozenset({"nodes", "metrics", "dashboard"})

SupervisorChannel = ProcessChannel[ToSupervisor, ToWorker]


class SupervisorUnavailable(ProxyError):
    """The supervisor has ended, or does not respond in time."""

    status = 503
    code = "supervisor_unavailable"


class Worker(OperatorApi):
    """Keeps this process's fleet as the supervisor knows it; what concerns all workers is asked of it."""

    def __init__(
        self,
        channel: SupervisorChannel,
        fleet: Fleet,
        metrics: Metrics,
        failures: FailureLog,
        timelines: Timelines,
        stop: StopRequest,
    ) -> None:
        # What pings report is kept by the supervisor.
        agents = AgentReports(fleet.clock)
        super().__init__(fleet, metrics, History(), failures, timelines, agents, down=list)
        self._channel = channel
        self._seq = itertools.count()
        self._pending: dict[int, asyncio.Future[Page]] = {}
        self.stop = stop
        """Made when the supervisor has said `Stop`, or has ended."""
        self.is_orphaned = False
        """The supervisor has ended."""

    def learn(self, start: Start) -> None:
        """Register the agents that the supervisor knows already."""
        for agent in start.agents:
            self._fleet.registry.register(agent.info, agent.heard_at)
        for incarnation in start.cordoned:
            self._fleet.cordon(incarnation, True)

    async def receive(self) -> None:
        """Handle the supervisor's messages until it ends."""
        try:
            while True:
                self.handle(await self._channel.receive())
        except ChannelClosed as closed:
            logger.error("the supervisor has ended: %s", closed)
        self.is_orphaned = True
        self.stop.make()
        for response in self._pending.values():
            if not response.done():
                response.set_exception(SupervisorUnavailable("the supervisor has ended"))

    async def beat(self) -> None:
        """Show the supervisor that this event loop runs, until cancelled."""
        while True:
            self._channel.send(Heartbeat())
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def handle(self, message: ToWorker) -> None:
        """Act on one message."""
        match message:
            case Registration():
                self._fleet.registry.register(message.info, message.heard_at)
            case Departure(agent=agent):
                self._fleet.registry.bye(agent)
            case SetCordoned(agent=agent, cordoned=cordoned):
                self._fleet.cordon(agent, cordoned)
            case Collect(seq=seq):
                self._channel.send(self._report(seq))
            case FindTimeline(seq=seq, request_id=request_id):
                found = self.own_timeline(request_id)
                self._channel.send(
                    FoundTimeline(seq=seq, timeline=None if found is None else msgspec.json.encode(found))
                )
            case PageResponse(seq=seq, page=page):
                if (response := self._pending.get(seq)) is not None and not response.done():
                    response.set_result(page)
            case Stop(limit_s=limit_s):
                if self.stop.made.is_set():
                    self.stop.at_once.set()
                self.stop.make(limit_s)
            case Start():
                logger.error("the supervisor has sent Start twice")

    async def page(self, name: PageName, model: str = "") -> Page:
        if name not in OF_ALL_WORKERS:
            return await super().page(name, model)
        return await self._request(PageRequest(name, model))

    async def timeline(self, request_id: str) -> Page:
        found = self.own_timeline(request_id)
        if found is not None:
            return timeline_page(request_id, found)
        return await self._request(TimelineRequest(request_id))

    async def agent(self, agent: Incarnation) -> Page:
        return await self._request(AgentRequest(agent))

    async def cordon(self, agent: Incarnation, cordoned: bool) -> Page:
        return await self._request(CordonRequest(agent, cordoned))

    async def pin_role(self, agent: Incarnation, role: Role) -> Page:
        return await self._request(RoleRequest(agent, role))

    async def drain(self, agent: Incarnation) -> Page:
        return await self._request(DrainRequest(agent))

    async def _request(self, request: OperatorRequest) -> Page:
        if self.is_orphaned:
            raise SupervisorUnavailable("the supervisor has ended")
        if len(self._pending) >= MAX_PENDING:
            raise SupervisorUnavailable("too many requests wait for the supervisor")
        seq = next(self._seq)
        response: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        self._pending[seq] = response
        self._channel.send(Forwarded(seq, request))
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                return await response
        except TimeoutError:
            raise SupervisorUnavailable("the supervisor does not respond") from None
        finally:
            del self._pending[seq]

    def _report(self, seq: int) -> Report:
        view = self.view()
        return Report(
            seq=seq,
            families=MetricFamily.all_of(self._metrics.registry),
            totals=self._metrics.totals(),
            models=self._metrics.model_totals(),
            phases=self._metrics.requests_in_flight(),
            failures=self._failures.latest(),
            events=self._fleet.registry.events.of_kinds(SEEN_BY_WORKERS),
            agents={
                node.incarnation: AgentStatus(
                    state=node.state, breaker=node.breaker, in_flight=view.in_flight(node.incarnation)
                )
                for node in view.snapshot.nodes
            },
        )


def main(argv: Sequence[str]) -> int:
    """Serve until stopped (returns 0) or until the supervisor has ended (returns 1)."""
    # Ctrl-C and a service manager's SIGTERM are for the supervisor, which stops its workers.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    return uvloop.run(_run(socket.socket(fileno=int(argv[0]))))


async def _run(end: socket.socket) -> int:
    channel: SupervisorChannel = await ProcessChannel.open(end, ToWorker)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            start = await channel.receive()
        if not isinstance(start, Start):
            raise ChannelClosed(f"{type(start).__name__} in place of Start")
        configure_logging(f"worker-{os.getpid()}", start.config.log_level, start.config.log_format)
        return_large_buffers()
        return await _serve(channel, start.config, start)
    finally:
        channel.close()


async def _serve(channel: SupervisorChannel, config: ProxyConfig, start: Start) -> int:
    keys, metrics, failures, timelines = Keys.read(config), metrics_of(config), FailureLog(), Timelines()
    fleet = Fleet(fleet_settings(config), metrics, asyncio.get_running_loop().time, start.settled_at)
    metrics.add_collector(AgentCollector(fleet))
    metrics.add_collector(ScalingCollector(fleet))
    stop = StopRequest(config.drain_s)
    worker = Worker(channel, fleet, metrics, failures, timelines, stop)
    worker.learn(start)
    with listening_socket(config.host, start.port, shared=True) as listener:
        async with asyncio.TaskGroup() as tasks:
            talking = [tasks.create_task(worker.receive()), tasks.create_task(worker.beat())]
            async with (
                open_services(config, keys, fleet, metrics, failures, timelines, worker, stop) as services,
                serving(services, keys, listener, stop),
            ):
                spare_full_collections()
                channel.send(Listening())
                await stop.made.wait()
            for task in talking:
                task.cancel()
    return 1 if worker.is_orphaned else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
