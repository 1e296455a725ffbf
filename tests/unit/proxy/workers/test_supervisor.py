# SPDX-License-Identifier: Apache-2.0
"""The supervisor and its workers' ends, in one process: what is put together, and what ends what."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvferry.common.stop import StopRequest
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.errors import ProxyError
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet, FleetSettings
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.fleet.routing.routing_request import RoutingRequest
from kvferry.proxy.fleet.snapshot import NodeState, NoPair
from kvferry.proxy.telemetry.history import Failure, FailureLog
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Timelines
from kvferry.proxy.wire.registration import Incarnation
from kvferry.proxy.workers import supervisor as supervisor_module
from kvferry.proxy.workers import worker as worker_module
from kvferry.proxy.workers.messages import Collect, Listening, ProcessChannel, Start, ToSupervisor, ToWorker
from kvferry.proxy.workers.supervisor import MAX_MISSED, Supervisor, WorkerSession
from kvferry.proxy.workers.worker import SupervisorUnavailable, Worker
from tests.helpers.waiting import until
from tests.unit.proxy.builders import load, registration
from tests.unit.proxy.exposition import sample

DEADLINE_S = 20.0
PREFILL, DECODE = registration("prefill", 1), registration("decode", 2, load=load(max_running=1))
DECODE_ID = Incarnation(DECODE.incarnation)
NAMED = registration("decode", 9)
"""A server that an operator has named."""
REQUESTS = 'kvferry_proxy_requests_total{endpoint="completions",status="200"}'
OK = ("completions", "", "200")
PREFILLING = 'kvferry_proxy_requests_in_flight{phase="prefill"}'


@dataclass(slots=True)
class Process:
    """What one worker process holds."""

    worker: Worker
    fleet: Fleet
    metrics: Metrics
    failures: FailureLog
    session: WorkerSession
    channel: ProcessChannel[Any, Any]
    beating: asyncio.Task[None]

    def die(self) -> None:
        self.channel.close()

    async def reserve(self) -> Reservation | NoPair:
        loop = asyncio.get_running_loop()
        return await self.fleet.acquire(
            AcquireRequest(routing_request=RoutingRequest(model="m"), by=loop.time() + 5)
        )


@dataclass(slots=True)
class Office:
    """A supervisor that knows a pair of agents, and workers on demand."""

    supervisor: Supervisor
    registry: Registry
    metrics: Metrics
    stack: AsyncExitStack

    async def process(self) -> Process:
        made = await self.stack.enter_async_context(self._process())
        await until(lambda: made.session.is_listening)
        return made

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Process]:
        supervisor = self.supervisor
        ours, theirs = socket.socketpair()
        channel: ProcessChannel[Any, Any] = await ProcessChannel.open(theirs, ToWorker)
        session = WorkerSession(
            await ProcessChannel.open(ours, ToSupervisor), supervisor, 1, kill=channel.close
        )
        session.channel.send(supervisor._start_message())
        start = await channel.receive()
        assert isinstance(start, Start)
        metrics, failures = Metrics(), FailureLog()
        fleet = Fleet(FleetSettings(), metrics, asyncio.get_running_loop().time)
        worker = Worker(channel, fleet, metrics, failures, Timelines(), StopRequest(1.0))
        worker.learn(start)
        supervisor._workers.add(session)

        async def serve() -> None:
            await session.serve(asyncio.Semaphore(0))
            supervisor._forget(session)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve())
            tasks.create_task(worker.receive())
            beating = tasks.create_task(worker.beat())
            channel.send(Listening())
            try:
                yield Process(worker, fleet, metrics, failures, session, channel, beating)
            finally:
                beating.cancel()
                channel.close()


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    clock = asyncio.get_running_loop().time
    registry, metrics = Registry(clock), Metrics()
    for agent in (PREFILL, DECODE):
        registry.register(agent)
    supervisor = Supervisor(ProxyConfig(), 1, registry, metrics, list, clock)
    async with AsyncExitStack() as stack:
        yield Office(supervisor, registry, metrics, stack)


async def nodes(process: Process) -> dict[str, Any]:
    page = msgspec.json.decode((await process.worker.page("nodes")).body)
    return {node["incarnation"]: node for node in page["nodes"]}


async def test_what_is_in_flight_counts_once_every_worker_knows_that_the_agent_leaves(
    office: Office,
) -> None:
    _, second = await office.process(), await office.process()
    agent, collect = Incarnation(PREFILL.incarnation), office.supervisor._collect
    assert office.supervisor.in_flight(agent) == 2, "no worker has reported"
    second.fleet.slots.acquire(agent, 3)
    await collect()
    assert office.supervisor.in_flight(agent) == 1 + 1 + 3, "both may still route to it"
    leaving = msgspec.structs.replace(PREFILL, index=PREFILL.index + 1, state="draining")
    office.registry.register(leaving)
    assert office.supervisor.in_flight(agent) == 1 + 1 + 3, "neither has said that it knows"
    await collect()
    assert office.supervisor.in_flight(agent) == 3
    second.die()
    await until(lambda: office.supervisor.in_flight(agent) == 0)


async def test_a_new_worker_knows_the_fleet_at_once_and_then_what_changes(office: Office) -> None:
    office.registry.cordon(Incarnation(PREFILL.incarnation))
    process = await office.process()
    first, second = process.fleet.registry.snapshot().nodes
    assert (first.info, first.state) == (PREFILL, NodeState.CORDONED)
    assert (second.info, second.state) == (DECODE, NodeState.READY)
    assert first.heard_at <= process.fleet.clock(), "as old as the supervisor's"
    another = registration("decode", 3)
    office.registry.register(another)
    await until(lambda: len(process.fleet.registry.snapshot().nodes) == 3)
    office.registry.bye(Incarnation(another.incarnation))
    await until(lambda: len(process.fleet.registry.snapshot().nodes) == 2)


async def test_where_a_request_went_is_found_whichever_worker_has_served_it(office: Office) -> None:
    one, other = await office.process(), await office.process()
    other.worker._timelines.begin("r", "completions", 0.0).add(0.0, "route")
    for process in (one, other):
        page = await process.worker.timeline("r")
        assert (page.status, msgspec.json.decode(page.body)["request_id"]) == (200, "r")
    assert (await one.worker.timeline("unheard-of")).status == 404
    other.die()
    await until(lambda: not other.session.is_listening)
    assert (await one.worker.timeline("r")).status == 404


async def test_an_agents_history_is_that_of_the_process_that_hears_its_pings(office: Office) -> None:
    assert office.registry.register(msgspec.structs.replace(DECODE, index=DECODE.index + 1)) is None
    for process in (await office.process(), await office.process()):
        page = await process.worker.agent(DECODE_ID)
        shown = msgspec.json.decode(page.body)
        assert (page.status, shown["incarnation"]) == (200, DECODE_ID)
        assert any(point is not None for point in shown["charts"]["running"])
        assert (await process.worker.agent(Incarnation("nobody"))).status == 404


async def test_what_one_worker_finds_out_of_an_agent_outlives_the_worker(office: Office) -> None:
    process = await office.process()
    process.fleet.registry.connection_refused(DECODE_ID)
    for _ in range(2):
        page = msgspec.json.decode((await process.worker.page("dashboard")).body)
        kinds = [(event["kind"], event["agent"]) for event in page["events"]]
        assert kinds[0] == ("connection_refused", DECODE_ID)
        assert kinds.count(("joined", DECODE_ID)) == 1, "each worker sees it join, the supervisor says so"
        process.die()
        await until(lambda: not office.supervisor._workers)
        process = await office.process()


async def test_a_registration_that_is_refused_reaches_no_worker(office: Office) -> None:
    process = await office.process()
    stale = msgspec.structs.replace(DECODE, index=0, model="other")
    assert office.registry.register(stale) is not None
    assert set(await nodes(process)) == {PREFILL.incarnation, DECODE.incarnation}
    assert not [node for node in process.fleet.registry.snapshot().nodes if node.info.model == "other"]


async def test_limits_are_each_workers_own_and_sequences_in_flight_add_up(office: Office) -> None:
    one, other = await office.process(), await office.process()
    held = [await each.reserve() for each in (one, other)]
    for process in (one, other):
        shown = await nodes(process)
        assert [shown[each.incarnation]["in_flight"] for each in (PREFILL, DECODE)] == [2, 2]
    one.die()
    await until(lambda: not one.session.is_listening)
    assert (await nodes(other))[DECODE_ID]["in_flight"] == 1, "what a dead worker held is gone with it"
    for each in held:
        assert isinstance(each, Reservation)
        each.release()


async def test_the_worst_that_a_worker_found_of_an_agent_is_shown(office: Office) -> None:
    one, other = await office.process(), await office.process()
    for _ in range(5):
        one.fleet.registry.leg_failed(DECODE_ID)
    other.fleet.registry.connection_refused(Incarnation(PREFILL.incarnation))
    for process in (one, other):
        shown = await nodes(process)
        assert (shown[DECODE_ID]["breaker"], shown[DECODE_ID]["state"]) == ("open", "tripped")
        assert shown[PREFILL.incarnation]["state"] == "refusing"
        body = (await process.worker.page("metrics")).body
        assert sample(body.decode(), 'kvferry_proxy_nodes{role="decode",state="tripped"}') == 1
        assert sample(body.decode(), 'kvferry_proxy_nodes{role="decode",state="ready"}') == 0


async def test_an_agent_that_is_asked_to_drain_gets_nothing_new_from_any_worker(office: Office) -> None:
    one, other = await office.process(), await office.process()
    office.registry.register(NAMED, reads_acks=False)
    assert (await one.worker.drain(Incarnation(NAMED.incarnation))).status == 409, "it would not be told"
    office.registry.bye(Incarnation(NAMED.incarnation))
    assert (await one.worker.drain(Incarnation("nobody"))).status == 404
    page = await one.worker.drain(DECODE_ID)
    assert (page.status, msgspec.json.decode(page.body)["state"]) == (202, "draining")
    assert office.registry.drain_requested(DECODE_ID)
    for process in (one, other, await office.process()):
        assert await process.reserve() is NoPair.NO_DECODE


async def test_a_pinned_role_reaches_all_workers(office: Office) -> None:
    one, other = await office.process(), await office.process()
    both = registration("both", 7)
    office.registry.register(both)
    agent = Incarnation(both.incarnation)
    page = await one.worker.pin_role(agent, "decode")
    assert page.status == 200
    shown = msgspec.json.decode(page.body)
    assert (shown["role"], shown["role_pinned"]) == ("decode", True)
    for process in (one, other, await office.process()):
        [node] = [each for each in process.fleet.registry.snapshot().nodes if each.incarnation == agent]
        assert node.info.role == "decode"
    assert (await other.worker.pin_role(agent, "both")).status == 200
    page = await one.worker.pin_role(DECODE_ID, "prefill")
    assert (page.status, msgspec.json.decode(page.body)["error"]["code"]) == (409, "role_fixed")
    assert (await one.worker.pin_role(Incarnation("nobody"), "both")).status == 404


async def test_a_cordon_reaches_all_workers(office: Office) -> None:
    one, other = await office.process(), await office.process()
    page = await one.worker.cordon(DECODE_ID, True)
    assert (page.status, msgspec.json.decode(page.body)["state"]) == (200, "cordoned")
    for process in (one, other):
        assert await process.reserve() is NoPair.NO_DECODE
        assert (await process.worker.page("ready")).status == 503
    late = await office.process()
    assert await late.reserve() is NoPair.NO_DECODE
    assert (await other.worker.cordon(DECODE_ID, False)).status == 200
    for process in (one, other, late):
        held = await process.reserve()
        assert isinstance(held, Reservation)
        held.release()
    assert (await one.worker.cordon(Incarnation("nobody"), True)).status == 404


async def test_metrics_add_up_and_do_not_fall_when_a_worker_dies(office: Office) -> None:
    one, other = await office.process(), await office.process()
    for process, count in ((one, 3), (other, 4)):
        process.metrics.requests.add(OK, count)
        process.metrics.of_model("").ttft.observe(0.1)
        process.metrics.in_flight.add(("prefill", ""), 1)
    office.metrics.bad_pings.inc()
    for process in (one, other):
        page = (await process.worker.page("metrics")).body.decode()
        assert sample(page, REQUESTS) == 7
        assert sample(page, PREFILLING) == 2
        assert sample(page, "kvferry_proxy_time_to_first_token_seconds_count") == 2
        assert sample(page, 'kvferry_proxy_time_to_first_token_seconds_bucket{le="0.05"}') == 0
        assert sample(page, 'kvferry_proxy_time_to_first_token_seconds_bucket{le="+Inf"}') == 2
        assert sample(page, "kvferry_proxy_bad_pings_total") == 1
        assert sample(page, 'kvferry_proxy_nodes{role="decode",state="ready"}') == 1, "one entry per agent"
        assert sample(page, "kvferry_proxy_build_info") == 1, "the same in all processes"
        assert page.count("# TYPE kvferry_proxy_requests_total counter") == 1
    one.die()
    await until(lambda: not one.session.is_listening)
    third = await office.process()
    third.metrics.requests.add(OK, 2)
    page = (await other.worker.page("metrics")).body.decode()
    assert sample(page, REQUESTS) == 9
    assert sample(page, PREFILLING) == 1
    assert sample(page, "kvferry_proxy_time_to_first_token_seconds_count") == 2


async def test_the_dashboard_shows_what_all_have_seen(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "WATCH_INTERVAL_S", 0.05)
    one, other = await office.process(), await office.process()
    failure = Failure(
        endpoint="completions", status=502, code="agent_lost", message="", model="m", request_id="r"
    )
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(office.supervisor.watch())
        await asyncio.sleep(0.1)
        for process, count in ((one, 3), (other, 4)):
            process.metrics.events += count
            process.metrics.of_model("").ttft.observe(0.1)
            process.failures.add(failure, process.fleet.clock())
            process.metrics.in_flight.add(("decode", ""), 1)
            process.metrics.ended("completions", 200, DECODE.model)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                shown = msgspec.json.decode((await one.worker.page("dashboard")).body)
                if any(shown["charts"]["events"]):
                    break
        for process in (one, other):
            of_model = msgspec.json.decode((await process.worker.page("dashboard", DECODE.model)).body)
            assert max(of_model["charts"]["requests"]) == max(shown["charts"]["requests"]) > 0
            of_another = msgspec.json.decode((await process.worker.page("dashboard", "another")).body)
            assert not any(of_another["charts"]["requests"])
            assert (of_another["num_nodes"], of_another["failures"]) == (0, [])
        watching.cancel()
    assert [each["count"] for each in shown["failures"]] == [2]
    assert shown["in_flight"] == {"decode": 2}
    assert shown["num_nodes"] == 2
    one.die()
    await until(lambda: not one.session.is_listening)
    shown = msgspec.json.decode((await other.worker.page("dashboard")).body)
    assert [each["count"] for each in shown["failures"]] == [2]
    assert shown["in_flight"] == {"decode": 1}


async def test_a_worker_that_hangs_is_killed_and_delays_a_page_no_longer_than_its_deadline(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped keeps its channel open."""
    for module in (supervisor_module, worker_module):
        monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(supervisor_module, "COLLECT_TIMEOUT_S", 0.02)
    hung, other = await office.process(), await office.process()
    hung.metrics.requests.add(OK, 3)
    assert sample((await other.worker.page("metrics")).body.decode(), REQUESTS) == 3
    real = Worker.handle

    def handle(self: Worker, message: Any) -> None:
        if self is not hung.worker or not isinstance(message, Collect):
            real(self, message)

    monkeypatch.setattr(Worker, "handle", handle)
    assert sample((await other.worker.page("metrics")).body.decode(), REQUESTS) == 3, "its last report stands"
    async with asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(office.supervisor.kill_hung())
        await asyncio.sleep(0.02 * 2 * MAX_MISSED)
        assert hung.session.is_listening, "a late report is no sign of a hang"
        time.sleep(0.02 * 2 * MAX_MISSED)  # noqa: ASYNC251  # the host stands still
        await asyncio.sleep(0.02)
        assert hung.session.is_listening and other.session.is_listening
        hung.beating.cancel()
        await until(lambda: not hung.session.is_listening)
        killing.cancel()
    assert other.session.is_listening
    assert sample((await other.worker.page("metrics")).body.decode(), REQUESTS) == 3


async def test_without_the_supervisor_an_operator_gets_a_typed_503(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await office.process()
    monkeypatch.setattr(worker_module, "RESPONSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(Supervisor, "_collect", lambda self: asyncio.sleep(1))
    for asked in (process.worker.page("nodes"), process.worker.cordon(DECODE_ID, False)):
        with pytest.raises(SupervisorUnavailable, match="does not respond") as failed:
            await asked
        assert (failed.value.status, failed.value.code) == (503, "supervisor_unavailable")
    monkeypatch.setattr(worker_module, "RESPONSE_TIMEOUT_S", DEADLINE_S)
    waiting = asyncio.ensure_future(process.worker.page("nodes"))
    await asyncio.sleep(0)
    process.session.channel.close()
    with pytest.raises(SupervisorUnavailable, match="has ended"):
        await waiting
    with pytest.raises(SupervisorUnavailable, match="has ended"):
        await process.worker.page("metrics")
    assert process.worker.is_orphaned and process.worker.stop.made.is_set()
    held = await process.reserve()
    assert isinstance(held, Reservation), "requests need no supervisor"
    held.release()


async def test_operators_requests_do_not_pile_up(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await office.process()
    monkeypatch.setattr(worker_module, "MAX_PENDING", 1)
    monkeypatch.setattr(Supervisor, "_collect", lambda self: asyncio.sleep(0.05))
    waiting = asyncio.ensure_future(process.worker.page("nodes"))
    await asyncio.sleep(0)
    with pytest.raises(SupervisorUnavailable, match="too many"):
        await process.worker.page("nodes")
    assert (await waiting).status == 200


async def test_an_internal_error_is_a_500_and_ends_no_worker(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await office.process()
    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_view", lambda self: 1 // 0)
        page = await process.worker.page("nodes")
    assert (page.status, msgspec.json.decode(page.body)["error"]["code"]) == (500, ProxyError.code)
    assert (await process.worker.page("nodes")).status == 200


@pytest.mark.parametrize("asked", [True, False])
async def test_only_the_end_of_a_worker_that_was_not_asked_is_logged(
    office: Office, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    caplog.set_level("INFO")
    worker = await office.process()
    if asked:
        office.supervisor.stop(0.0)
    worker.die()
    await until(lambda: not office.supervisor._workers)
    said = [record.message for record in caplog.records if "worker 1" in record.message]
    assert said == ([] if asked else ["worker 1 has ended: it closed the channel"])
