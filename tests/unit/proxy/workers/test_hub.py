# SPDX-License-Identifier: Apache-2.0
"""A hub and its workers' clients over real socket pairs, in one process: what holds whoever leaves when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from kvferry.proxy.config import ProxyConfig, config_from_json, config_to_json
from kvferry.proxy.errors import NoAgent, Overloaded, ProxyError
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import LocalFleet
from kvferry.proxy.fleet.interface import AcquireRequest
from kvferry.proxy.fleet.router import NoPair
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.telemetry.history import Failure, History
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Incarnation
from kvferry.proxy.workers import hub as hub_module
from kvferry.proxy.workers import link as link_module
from kvferry.proxy.workers import reports
from kvferry.proxy.workers.hub import Hub
from kvferry.proxy.workers.link import Link, LinkLost
from kvferry.proxy.workers.link_messages import Begin, Collect, ToHub, ToWorker
from kvferry.proxy.workers.remote_fleet import RemoteFleet
from kvferry.proxy.workers.reports import Report
from tests.unit.proxy.builders import load, registration

DEADLINE_S = 5.0


@dataclass(slots=True)
class Worker:
    """One worker's client, and what it counts."""

    fleet: RemoteFleet
    metrics: Metrics
    history: History
    end: Link


@dataclass(slots=True)
class Office:
    """A hub with one pair of agents, each of which runs `room` sequences, and workers on demand."""

    local: LocalFleet
    hub: Hub
    stack: AsyncExitStack

    async def worker(self) -> Worker:
        return await self.stack.enter_async_context(self._worker())

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[Worker]:
        ours, theirs = socket.socketpair()
        hub_end = await Link.over(ours, msgspec.msgpack.Decoder(ToHub))
        worker_end = await Link.over(theirs, msgspec.msgpack.Decoder(ToWorker))
        metrics, history = Metrics(), History()

        def report() -> Report:
            return Report(families=reports.families_of(metrics.collect()), history=history.state())

        fleet = RemoteFleet(worker_end, report, chunks=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.hub.serve(hub_end, asyncio.Event()))
            tasks.create_task(fleet.listen())
            try:
                yield Worker(fleet, metrics, history, worker_end)
            finally:
                worker_end.close()

    async def until_free(self) -> None:
        await until(lambda: self.local.slots.idle and not self.local.admission.waiting)


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    config = ProxyConfig(queue_limit=2)
    local = LocalFleet(config, Metrics(), History(), asyncio.get_running_loop().time)
    now = local.clock()
    for role, port in (("prefill", 1), ("decode", 2)):
        local.registry.register(registration(role, port, load=load(max_running=1)), now)
    async with AsyncExitStack() as stack:
        made = Office(local, Hub(local), stack)
        yield made
    await made.until_free()
    local.admission.check_integrity()


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not claim():
            await asyncio.sleep(0.005)


def call(wait_s: float = 60.0, **fields: object) -> AcquireRequest:
    ask = RoutingRequest(model="m", prompt="once upon a time " * 100)
    return AcquireRequest(**{"ask": ask, "by": asyncio.get_running_loop().time() + wait_s, **fields})


async def entered(worker: Worker) -> Reservation:
    hold = await worker.fleet.enter(call())
    assert isinstance(hold, Reservation)
    return hold


async def test_a_hold_counts_for_all_workers_until_it_is_given_back(office: Office) -> None:
    one, other = await office.worker(), await office.worker()
    hold = await entered(one)
    waiting = asyncio.ensure_future(entered(other))
    await until(lambda: office.local.admission.waiting == 1)
    assert not waiting.done()
    hold.prefill_over()
    hold.release()
    (await waiting).release()


async def test_what_the_hub_refuses_is_refused_alike(office: Office) -> None:
    worker = await office.worker()
    assert await worker.fleet.enter(call(ask=RoutingRequest(model="other"))) is NoPair.UNKNOWN_MODEL
    hold = await entered(worker)
    with pytest.raises(Overloaded) as late:
        await worker.fleet.enter(call(wait_s=0.05))
    assert (late.value.status, late.value.retry_after_s) == (429, 1)
    hold.release()


async def test_what_the_hub_fails_at_costs_one_request_and_no_worker(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else's: the worker holds and waits as before."""
    worker = await office.worker()
    hold = await entered(worker)
    with monkeypatch.context() as patch:
        patch.setattr(office.local.router, "choose", lambda *_, **__: 1 // 0)
        with pytest.raises(ProxyError) as failed:
            await worker.fleet.enter(call())
    assert (failed.value.status, failed.value.code) == (500, "internal_error")
    hold.release()
    (await entered(worker)).release()


async def test_a_worker_learns_which_agents_are_lost(office: Office) -> None:
    """Those that are silent, where others could do what they did."""
    worker = await office.worker()
    gone = [registration("decode", 7), registration("decode", 8, model="other")]
    known = [registration("prefill", 1), registration("decode", 2)]
    assert await worker.fleet.find_lost([*gone, *known]) == {gone[0].incarnation}
    worker.end.close()
    with pytest.raises(NoAgent):
        await worker.fleet.find_lost(gone)


async def test_a_worker_that_ends_holds_and_waits_for_nothing(office: Office) -> None:
    dying, other = await office.worker(), await office.worker()
    await entered(dying)
    waiting = asyncio.ensure_future(dying.fleet.enter(call()))
    await until(lambda: office.local.admission.waiting == 1)
    dying.end.close()
    (await entered(other)).release()
    with pytest.raises(NoAgent):
        await waiting
    with pytest.raises(NoAgent):
        await dying.fleet.enter(call())


async def test_a_client_that_leaves_the_queue_leaves_the_hubs_too(office: Office) -> None:
    worker = await office.worker()
    hold = await entered(worker)
    waiting = asyncio.ensure_future(worker.fleet.enter(call()))
    await until(lambda: office.local.admission.waiting == 1)
    waiting.cancel()
    await until(lambda: office.local.admission.waiting == 0)
    hold.release()


async def test_a_client_that_leaves_as_it_is_let_in_keeps_no_slot(office: Office) -> None:
    """The hub's answer and the worker's `Leave` pass each other, at any step of either."""
    worker = await office.worker()
    for steps in range(12):
        entering = asyncio.ensure_future(worker.fleet.enter(call()))
        for _ in range(steps):
            await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait([entering])
        if not entering.cancelled():
            entering.result().release()
        await office.until_free()


async def test_breakers_and_refusals_are_everybodys(office: Office) -> None:
    one, other = await office.worker(), await office.worker()
    decode = Incarnation(registration("decode", 2).incarnation)
    for worker in (one, other, one, other, one):
        worker.fleet.leg_failed(decode)
    for worker in (one, other):
        page = msgspec.json.decode((await worker.fleet.page("nodes")).body)
        assert [node["breaker"] for node in page["nodes"]] == ["closed", "open"]
    assert await other.fleet.enter(call()) is NoPair.NO_DECODE
    one.fleet.connection_refused(Incarnation(registration("prefill", 1).incarnation))
    page = msgspec.json.decode((await one.fleet.page("nodes")).body)
    assert page["nodes"][0]["state"] == "refusing"


async def test_a_drain_asked_of_one_holds_for_all(office: Office) -> None:
    one, other = await office.worker(), await office.worker()
    decode = Incarnation(registration("decode", 2).incarnation)
    page = await one.fleet.drain(decode, True)
    assert (page.status, msgspec.json.decode(page.body)["drained"]) == (200, True)
    assert await other.fleet.enter(call()) is NoPair.NO_DECODE
    assert (await other.fleet.page("ready")).status == 503
    assert (await other.fleet.drain(decode, False)).status == 200
    (await entered(one)).release()
    assert (await one.fleet.drain(Incarnation("nobody"), True)).status == 404


def sample(body: bytes, name: str) -> float:
    found = [line for line in body.decode().splitlines() if line.startswith(f"{name} ")]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


REQUESTS = 'kvferry_requests_total{endpoint="completions",status="200"}'
PREFILLING = 'kvferry_requests_in_flight{phase="prefill"}'


async def test_metrics_add_up_and_outlive_the_worker_that_counted(office: Office) -> None:
    one, other = await office.worker(), await office.worker()
    for worker, count in ((one, 3), (other, 4)):
        worker.metrics.requests.labels("completions", "200").inc(count)
        worker.metrics.ttft.observe(0.1)
        worker.metrics.in_flight.add("prefill", 1)
    office.local.metrics.bad_pings.inc()
    for worker in (one, other):
        body = (await worker.fleet.page("metrics")).body
        assert sample(body, REQUESTS) == 7
        assert sample(body, PREFILLING) == 2
        assert sample(body, "kvferry_ttft_seconds_count") == 2
        assert sample(body, 'kvferry_ttft_seconds_bucket{le="0.05"}') == 0
        assert sample(body, 'kvferry_ttft_seconds_bucket{le="+Inf"}') == 2
        assert sample(body, "kvferry_bad_pings_total") == 1
        assert sample(body, 'kvferry_nodes{role="decode",state="ready"}') == 1
        assert body.count(b"# TYPE kvferry_requests_total counter") == 1
    one.end.close()
    await one.fleet.stopped.wait()
    async with asyncio.timeout(DEADLINE_S):
        while sample(body := (await other.fleet.page("metrics")).body, PREFILLING) != 1:
            await asyncio.sleep(0.005)
    assert sample(body, REQUESTS) == 7, "a counter does not fall"
    assert sample(body, "kvferry_ttft_seconds_count") == 2


async def test_the_operators_page_shows_what_all_have_seen(office: Office) -> None:
    one, other = await office.worker(), await office.worker()
    now = office.local.clock() - 3.0
    failure = Failure(endpoint="completions", status=502, code="agent_lost", model="m", request_id="r")
    for worker, count in ((one, 3), (other, 4)):
        worker.history.events(count, now)
        worker.history.first_text(0.1, now)
        worker.history.failed(failure, now)
        worker.metrics.in_flight.add("decode", 1)
    shown = msgspec.json.decode((await one.fleet.page("live")).body)
    assert max(shown["charts"]["events"]) == 7 / 2.0
    assert [each["count"] for each in shown["failures"]] == [2]
    assert shown["in_flight"] == {"decode": 2}
    assert shown["num_nodes"] == 2


async def test_a_worker_that_falls_silent_is_given_up(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped keeps its link open; nothing but its silence tells."""
    for name, value in {"WATCH_INTERVAL_S": 0.02, "COLLECT_TIMEOUT_S": 0.02, "MAX_MISSED": 2}.items():
        monkeypatch.setattr(hub_module, name, value)
    worker = await office.worker()
    await entered(worker)
    real = RemoteFleet._take
    monkeypatch.setattr(
        RemoteFleet,
        "_take",
        lambda self, message: None if isinstance(message, Collect) else real(self, message),
    )
    async with asyncio.timeout(DEADLINE_S):
        await worker.fleet.stopped.wait()
    await office.until_free()


async def test_a_link_says_when_the_other_end_is_gone() -> None:
    ours, theirs = socket.socketpair()
    link = await Link.over(ours, msgspec.msgpack.Decoder(ToHub))
    theirs.close()
    with pytest.raises(LinkLost):
        await link.receive()
    link.close()


async def test_what_is_no_message_ends_a_link() -> None:
    ours, theirs = socket.socketpair()
    link: Link = await Link.over(ours, msgspec.msgpack.Decoder(ToHub))
    with theirs:
        theirs.send(b"\x00\x00\x00\x01\xc1")
        with pytest.raises(LinkLost, match="not a message"):
            await link.receive()
    link.close()


async def test_an_end_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_UNSENT_BYTES", 100_000)
    ours, theirs = socket.socketpair()
    link: Link = await Link.over(ours, msgspec.msgpack.Decoder(ToHub))
    with theirs:
        for _ in range(1000):
            link.send(Begin(config=bytes(10_000), port=1))
        with pytest.raises(LinkLost):
            await link.receive()
        link.send(Begin(config=b"", port=1))


def test_settings_reach_a_worker_as_they_are(tmp_path: object) -> None:
    config = ProxyConfig(port=5, workers=3, decode_policy="prefix_aware", api_keys="/keys")  # type: ignore[arg-type]
    again = config_from_json(config_to_json(config))
    assert again.workers == 3 and again.decode_policy == "prefix_aware"
    assert str(again.api_keys) == "/keys" and again.cluster_key is None
