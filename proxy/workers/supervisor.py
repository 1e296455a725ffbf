# SPDX-License-Identifier: Apache-2.0
"""A proxy of several processes (`--workers`): this one supervises those that serve.

    agents ── pings ──▶ supervisor: discovery, registrations, the sum of what workers report
                         │ a channel each: registrations there, reports back
    clients ── HTTP ──▶ workers, all on one port (SO_REUSEPORT) ── HTTP ──▶ agents

No client's request waits for another process. What must be seen as one, `/metrics`, `/nodes`, `/ui` and
drains, a worker asks of the supervisor.

A worker that dies is replaced; the streams of the others go on. When workers die again and again, the whole
proxy ends. When the supervisor ends, its workers finish what they have, within `drain_s`, and end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvferry.common.child_process import ChildProcess
from kvferry.common.stop import StopRequest
from kvferry.proxy.api.operator.commands import PageCache, PageName
from kvferry.proxy.api.operator.pages import (
    Activity,
    FleetView,
    Page,
    ProxyFacts,
    agent_page,
    dashboard_page,
    drain_page,
    fleet_page,
    node_page,
    role_page,
    timeline_page,
)
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.discovery.discovery import Discovery, DownServer
from kvferry.proxy.errors import ProxyError
from kvferry.proxy.fleet.circuit_breaker import BreakerState
from kvferry.proxy.fleet.fleet import note_model
from kvferry.proxy.fleet.registry import PAUSE_CHECK_INTERVAL_S, Registry
from kvferry.proxy.fleet.snapshot import Node, NodeState
from kvferry.proxy.settings import (
    Keys,
    base_url,
    discovery_settings,
    fleet_settings,
    listening_socket,
    proxy_facts,
)
from kvferry.proxy.telemetry.agent_reports import AgentReports
from kvferry.proxy.telemetry.collectors import FleetCollector
from kvferry.proxy.telemetry.event_log import EventKind, EventLog
from kvferry.proxy.telemetry.history import SLICE_S, FailureLog, History
from kvferry.proxy.telemetry.metrics import (
    CONTENT_TYPE,
    Metrics,
    Totals,
)
from kvferry.proxy.wire.registration import PULL_BUCKETS, Bye, Incarnation, Register, Role
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
    exposition,
    sum_families,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
"""For a worker to exit once its channel is closed, or its requests were cut."""
RESTART_PAUSE_S = 0.2
MAX_DEATHS = 5
DEATHS_WITHIN_S = 60.0
COLLECT_TIMEOUT_S = 2.0
"""For a worker's report; until a late one arrives, the one before stands."""
WATCH_INTERVAL_S = SLICE_S
MAX_MISSED = 8
"""Heartbeats in a row; then a worker counts as hung, is killed and replaced."""

# Worst state last. A worker adds to pings only what it found when it used the agent.
_STATES = (NodeState.READY, NodeState.TRIPPED, NodeState.REFUSING)
_NO_NEW_REQUESTS = (NodeState.CORDONED, NodeState.DRAINING)
_BREAKERS = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)

WorkerChannel = ProcessChannel[ToWorker, ToSupervisor]


class WorkersFailed(RuntimeError):
    """Workers do not start, or die too often."""


@dataclass(frozen=True, slots=True)
class RunningWorkers:
    """A proxy of several processes, and where it serves."""

    config: ProxyConfig
    port: int
    discovery_port: int

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return base_url(self.config, self.port)


@asynccontextmanager
async def running_workers(
    config: ProxyConfig, stop: StopRequest | None = None, settle_s: float = 0.0
) -> AsyncIterator[RunningWorkers]:
    """Serve for as long as the context is open; it ends as that of `server.running_proxy` does.

    Raises what that one raises, and `WorkersFailed`, maybe in an exception group.
    """
    stop = stop or StopRequest(config.drain_s)
    keys, metrics, clock = Keys.read(config), Metrics(), asyncio.get_running_loop().time
    registry = Registry(clock, rules=fleet_settings(config).rules)
    discovery = Discovery(discovery_settings(config, keys), registry, metrics, clock)
    with reserved_port(config.host, config.port) as port:
        supervisor = Supervisor(
            config,
            port,
            registry,
            metrics,
            discovery.down,
            clock,
            clock() + settle_s,
            proxy_facts(config, lambda: discovery.port),
        )
        async with (
            discovery.running(supervisor.in_flight) as discovery_port,
            asyncio.TaskGroup() as tasks,
        ):
            watching = tasks.create_task(supervisor.watch())
            killing = tasks.create_task(supervisor.kill_hung())
            monitoring = tasks.create_task(_monitor_pauses(registry))
            ending_at_once = tasks.create_task(supervisor.force_stop(stop))
            kept = [tasks.create_task(supervisor.keep_worker()) for _ in range(config.workers)]
            try:
                await supervisor.started()
                yield RunningWorkers(config, port, discovery_port)
            finally:
                supervisor.stop(stop.limit_s)
                await asyncio.wait(kept, timeout=stop.limit_s + 2 * END_TIMEOUT_S)
                for task in (ending_at_once, watching, killing, monitoring, *kept):
                    task.cancel()


class Supervisor:
    """Runs the workers of one proxy, and puts together what they report."""

    def __init__(
        self,
        config: ProxyConfig,
        port: int,
        registry: Registry,
        metrics: Metrics,
        down: Callable[[], Sequence[DownServer]],
        clock: Callable[[], float],
        settled_at: float = float("-inf"),
        facts: Callable[[], ProxyFacts] = ProxyFacts,
    ) -> None:
        self._settled_at = settled_at
        self._config = config
        self._port = port
        self._registry = registry
        self._metrics = metrics
        self._down = down
        self._facts = facts
        self._not_served = fleet_settings(config).not_served
        self._clock = clock
        self._workers: set[WorkerSession] = set()
        self._num_listening = asyncio.Semaphore(0)
        self._deaths: deque[float] = deque()
        self.is_stopping = False
        # Counted by workers that have ended: a sum must not fall.
        self._ended_families: list[MetricFamily] = []
        self._ended_totals = Totals()
        self._ended_models: dict[str, Totals] = {}
        self._ended_failures = FailureLog()
        self._history = History(PULL_BUCKETS)
        self._agents = AgentReports(clock)
        self._pages = PageCache(clock, self._make, lambda: registry.num_agents)
        self._fleet_metrics = FleetCollector(lambda: self._view().snapshot, registry.lost, down)
        registry.subscribe(partial(note_model, metrics))
        registry.subscribe(self._broadcast)
        registry.subscribe(self._agents.note)

    async def started(self) -> None:
        """Wait until as many workers as there are to be listen. Raises `WorkersFailed`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for _ in range(self._config.workers):
                    await self._num_listening.acquire()
        except TimeoutError:
            raise WorkersFailed(f"the workers did not start within {START_TIMEOUT_S:.0f} s") from None

    def stop(self, limit_s: float) -> None:
        """Stop all workers within so many seconds, and replace none from now on. A second call: at once."""
        self.is_stopping = True
        for worker in self._workers:
            worker.channel.send(Stop(limit_s))

    async def force_stop(self, stop: StopRequest) -> None:
        """Stop the workers once more when `stop` is to be obeyed at once."""
        await stop.at_once.wait()
        self.stop(0.0)

    async def watch(self) -> None:
        """Collect reports regularly: little is lost with a worker."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await self._collect()
            totals, models = self._totals()
            self._history.record(totals.plus(self._agents.totals()), self._clock(), models)

    async def kill_hung(self) -> None:
        """Kill workers that are silent, until cancelled. Rounds count, not seconds: while this process or its
        host stands still, there are none.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            for worker in self._workers:
                worker.kill_if_hung()

    async def keep_worker(self) -> None:
        """Keep one worker running until stopped. Raises `WorkersFailed`."""
        while not self.is_stopping:
            status = await self._run_worker()
            if self.is_stopping:
                return
            logger.error("a worker ended with status %d and is replaced", status)
            self._registry.events.add(EventKind.WORKER_ENDED, self._clock(), detail=f"status {status}")
            self._count_death()
            await asyncio.sleep(RESTART_PAUSE_S)

    async def page(self, name: PageName, model: str = "") -> Page:
        """Return a page of all workers together."""
        return await self._pages.get(name, model)

    async def _make(self, name: PageName, model: str) -> Page:
        await self._collect()
        view = self._view()
        match name:
            case "metrics":
                families = [*self._families(), *MetricFamily.all_of(self._fleet_metrics)]
                return Page(body=exposition(families), content_type=CONTENT_TYPE)
            case "dashboard":
                return await dashboard_page(view, self._activity(), model)
            case _:
                return await fleet_page(name, view)

    def _activity(self) -> Activity:
        """What all workers together have seen."""
        failures, phases = FailureLog(), Counter[str]()
        failures.merge(self._ended_failures.latest())
        for report in self._reports():
            failures.merge(report.failures)
            phases.update(report.phases)
        return Activity(
            in_flight=phases,
            history=self._history,
            failures=failures.latest(),
            agents=self._agents,
            proxy=self._facts(),
        )

    def _events(self) -> EventLog:
        events = EventLog()
        events.merge(self._registry.events.latest())
        for report in self._reports():
            events.merge(report.events)
        return events

    async def page_for(self, request: OperatorRequest) -> Page:
        """Return what the operator sees who has sent a worker this request."""
        match request:
            case TimelineRequest(request_id=request_id):
                return await self.timeline(request_id)
            case PageRequest(name=name, model=model):
                return await self.page(name, model)
            case AgentRequest(agent=agent):
                return await self.agent(agent)
            case CordonRequest(agent=agent, cordoned=cordoned):
                return await self.cordon(agent, cordoned)
            case RoleRequest(agent=agent, role=role):
                return await self.pin_role(agent, role)
            case DrainRequest(agent=agent):
                return await self.drain(agent)

    async def timeline(self, request_id: str) -> Page:
        """Return the way of a request, whichever worker has served it, or a 404."""
        found = await asyncio.gather(*(worker.find_timeline(request_id) for worker in self._workers))
        body = next((timeline for timeline in found if timeline is not None), None)
        return timeline_page(request_id, None) if body is None else Page(body=body)

    async def agent(self, agent: Incarnation) -> Page:
        """Return what is known of an agent, or a 404."""
        await self._collect()
        return agent_page(self._view(), agent, self._agents)

    async def cordon(self, agent: Incarnation, cordoned: bool) -> Page:
        """Take an agent out of rotation in every worker, or put it back; return its entry in `/nodes`."""
        self._registry.cordon(agent, cordoned)
        for worker in self._workers:
            worker.channel.send(SetCordoned(agent=agent, cordoned=cordoned))
        self._pages.clear()
        await self._collect()
        return node_page(self._view(), agent)

    async def pin_role(self, agent: Incarnation, role: Role) -> Page:
        """Use an agent for a role; every worker learns it like a ping. Returns what the operator sees."""
        pinned = self._registry.pin_role(agent, role)
        self._pages.clear()
        await self._collect()
        return role_page(pinned, self._view(), agent)

    async def drain(self, agent: Incarnation) -> Page:
        """Ask an agent to drain; no worker sends it anything new. Returns what the operator sees."""
        asked = self._registry.drain(agent)
        if asked:
            for worker in self._workers:
                worker.channel.send(SetCordoned(agent=agent, cordoned=True))
        self._pages.clear()
        await self._collect()
        return drain_page(asked, self._view(), agent)

    def in_flight(self, agent: Incarnation) -> int:
        """Return how many sequences the workers have at an agent, as they reported last.

        A worker that may not know yet that the agent is leaving counts as one more: it may still route to it.
        """
        return sum(_in_flight(worker, agent) for worker in self._workers)

    async def _run_worker(self) -> int:
        """Run one worker to its end; return its exit status (negative: the signal that killed it)."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = await ChildProcess.start(
                ("-m", "kvferry.proxy.workers.worker", str(theirs.fileno())),
                "worker",
                pass_fds=(theirs.fileno(),),
            )
        try:
            channel: WorkerChannel = await ProcessChannel.open(ours, ToSupervisor)
            worker = WorkerSession(channel, self, child.pid, child.kill)
            worker.channel.send(self._start_message())
            self._workers.add(worker)
            if self.is_stopping:
                worker.channel.send(Stop(0.0))
            try:
                await worker.serve(self._num_listening)
            finally:
                self._forget(worker)
        finally:
            await child.stop(END_TIMEOUT_S, None)  # its channel is closed
        assert child.returncode is not None
        return child.returncode

    def _start_message(self) -> Start:
        nodes = self._registry.snapshot().nodes
        return Start(
            config=self._config,
            port=self._port,
            agents=tuple(Registration(info=node.info, heard_at=node.heard_at) for node in nodes),
            cordoned=tuple(node.incarnation for node in nodes if node.state in _NO_NEW_REQUESTS),
            settled_at=self._settled_at,
        )

    def _broadcast(self, update: Register | Bye) -> None:
        message: Registration | Departure
        if isinstance(update, Bye):
            message = Departure(update.incarnation)
        else:
            message = Registration(info=update, heard_at=self._clock())
        for worker in self._workers:
            worker.channel.send(message)

    async def _collect(self) -> None:
        """Ask every worker that serves for a report, all at once."""
        await asyncio.gather(*(worker.collect() for worker in self._workers if worker.is_listening))

    def _reports(self) -> Iterator[Report]:
        return (worker.report for worker in self._workers if worker.report is not None)

    def _families(self) -> list[MetricFamily]:
        return sum_families(
            [
                self._ended_families,
                MetricFamily.all_of(self._metrics.registry),
                *(each.families for each in self._reports()),
            ]
        )

    def _totals(self) -> tuple[Totals, dict[str, Totals]]:
        """Return what all workers have counted, and of it by model."""
        totals, models = self._ended_totals, self._ended_models
        for report in self._reports():
            totals, models = totals.plus(report.totals), _sum_models(models, report.models)
        return totals, models

    def _view(self) -> FleetView:
        """Return the fleet as all workers together see it."""
        now = self._clock()
        snapshot = self._registry.snapshot()
        reports = list(self._reports())
        in_flight = Counter[Incarnation]()
        nodes = []
        for node in snapshot.nodes:
            statuses = [each.agents[node.incarnation] for each in reports if node.incarnation in each.agents]
            in_flight[node.incarnation] = sum(status.in_flight for status in statuses)
            nodes.append(_merged(node, statuses))
        return FleetView(
            snapshot=snapshot.altered(nodes),
            not_served=self._not_served,
            in_flight=lambda agent: in_flight[agent],
            down=self._down(),
            rejected=self._registry.rejected_agents(),
            events=self._events,
            now=now,
        )

    def _forget(self, worker: WorkerSession) -> None:
        """Drop a worker that has ended, but for what it has counted."""
        self._workers.discard(worker)
        if (last := worker.report) is not None:
            counted = [family for family in last.families if family.kind != "gauge"]
            self._ended_families = sum_families([self._ended_families, counted])
            self._ended_totals = self._ended_totals.plus(last.totals)
            self._ended_models = _sum_models(self._ended_models, last.models)
            self._ended_failures.merge(last.failures)
            self._registry.events.merge(last.events)

    def _count_death(self) -> None:
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) > MAX_DEATHS:
            raise WorkersFailed(f"{len(self._deaths)} workers have died within {DEATHS_WITHIN_S:.0f} s")


class WorkerSession:
    """The supervisor's side of one worker's channel. `kill` ends its process."""

    def __init__(
        self, channel: WorkerChannel, supervisor: Supervisor, pid: int, kill: Callable[[], object]
    ) -> None:
        self.channel = channel
        self.pid = pid
        self._kill = kill
        self.report: Report | None = None
        """The latest one."""
        self.is_listening = False
        self._num_missed = 0
        """Rounds without a message, in a row."""
        self._supervisor = supervisor
        self._seq = itertools.count()
        self._collecting: dict[int, asyncio.Future[None]] = {}
        self._finding: dict[int, asyncio.Future[bytes | None]] = {}

    async def serve(self, num_listening: asyncio.Semaphore) -> None:
        """Handle the worker's messages until its channel is closed. Releases `num_listening` once."""
        try:
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(self._limit_start())
                while True:
                    message = await self.channel.receive()
                    self._num_missed = 0
                    match message:
                        case Listening():
                            starting.cancel()
                            self.is_listening = True
                            num_listening.release()
                        case Heartbeat():
                            pass
                        case Report():
                            self._take_report(message)
                        case FoundTimeline(seq=seq, timeline=timeline):
                            self._take_timeline(seq, timeline)
                        case Forwarded(seq=seq, request=request):
                            tasks.create_task(self._respond(seq, self._supervisor.page_for(request)))
        except* ChannelClosed as closed:
            level = logging.DEBUG if self._supervisor.is_stopping else logging.INFO
            logger.log(level, "worker %d has ended: %s", self.pid, closed.exceptions[0])
        finally:
            self.is_listening = False
            self.channel.close()
            for collected in self._collecting.values():
                if not collected.done():
                    collected.set_result(None)
            for found in self._finding.values():
                if not found.done():
                    found.set_result(None)

    def kill_if_hung(self) -> None:
        """Count a heartbeat as missed until a message comes; kill a worker that has missed `MAX_MISSED`."""
        self._num_missed += self.is_listening
        if self._num_missed == MAX_MISSED:
            logger.error("worker %d does not respond, and is killed", self.pid)
            with suppress(ProcessLookupError):  # it has just ended
                self._kill()

    async def collect(self) -> None:
        """Ask for a report and wait for it, for `COLLECT_TIMEOUT_S` at most."""
        seq = next(self._seq)
        collected = self._collecting[seq] = asyncio.get_running_loop().create_future()
        self.channel.send(Collect(seq))
        try:
            async with asyncio.timeout(COLLECT_TIMEOUT_S):
                await collected
        except TimeoutError:
            pass
        finally:
            del self._collecting[seq]

    async def find_timeline(self, request_id: str) -> bytes | None:
        """Return the way of a request that the worker has served, as JSON; None also if it does not say."""
        if not self.is_listening:
            return None
        seq = next(self._seq)
        found: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._finding[seq] = found
        self.channel.send(FindTimeline(seq=seq, request_id=request_id))
        try:
            async with asyncio.timeout(COLLECT_TIMEOUT_S):
                return await found
        except TimeoutError:
            return None
        finally:
            del self._finding[seq]

    def _take_report(self, report: Report) -> None:
        self.report = report
        if (collected := self._collecting.get(report.seq)) is not None and not collected.done():
            collected.set_result(None)

    def _take_timeline(self, seq: int, timeline: bytes | None) -> None:
        if (found := self._finding.get(seq)) is not None and not found.done():
            found.set_result(timeline)

    async def _limit_start(self) -> None:
        await asyncio.sleep(START_TIMEOUT_S)
        raise ChannelClosed(f"it did not start within {START_TIMEOUT_S:.0f} s")

    async def _respond(self, seq: int, making: Coroutine[Any, Any, Page]) -> None:
        try:
            page = await making
        except Exception:
            logger.exception("internal error while putting a page together")
            error = ProxyError("internal error; see the proxy's log")
            page = Page(status=error.status, body=error.body())
        self.channel.send(PageResponse(seq=seq, page=page))


async def _monitor_pauses(registry: Registry) -> None:
    """Have the registry know of this process's own pauses, until cancelled."""
    while True:
        registry.check_pause()
        await asyncio.sleep(PAUSE_CHECK_INTERVAL_S)


def _sum_models(ours: Mapping[str, Totals], theirs: Mapping[str, Totals]) -> dict[str, Totals]:
    return {**ours, **{model: ours.get(model, Totals()).plus(each) for model, each in theirs.items()}}


def _in_flight(worker: WorkerSession, agent: Incarnation) -> int:
    status = None if worker.report is None else worker.report.agents.get(agent)
    if status is None:
        return 1
    return status.in_flight + (status.state not in _NO_NEW_REQUESTS)


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold a TCP port on which this process's workers may listen; 0 lets the OS choose.

    Raises `OSError` when another process listens there: sharing the port with a stranger would be silent.
    """
    with listening_socket(host, port) as alone:
        port = alone.getsockname()[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((host, port))
        yield port


def _merged(node: Node, statuses: Sequence[AgentStatus]) -> Node:
    """Combine what pings show of an agent with the worst that any worker found."""
    breaker = max((each.breaker for each in statuses), key=_BREAKERS.index, default=BreakerState.CLOSED)
    state = node.state
    if state is NodeState.READY:
        found = [each.state for each in statuses if each.state in _STATES]
        state = max(found, key=_STATES.index, default=state)
    return replace(node, state=state, breaker=breaker)
