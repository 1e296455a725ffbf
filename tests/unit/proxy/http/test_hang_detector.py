# SPDX-License-Identifier: Apache-2.0
"""An agent that hangs: its requests, and no others, are retried elsewhere or fail before the idle timeout."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

from kvferry.proxy.fleet.fleet import Fleet, FleetSettings
from kvferry.proxy.fleet.registry import SILENCE_S, STALL_S
from kvferry.proxy.http.hang_detector import HangDetector
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import NODE_EXPIRY_S, Register
from tests.standins.agents import Fault, Leg
from tests.standins.engines import SERVERS, Fabric, StandInServer
from tests.unit.proxy.builders import Clock, load, registration
from tests.unit.proxy.conftest import Stage, StartStage

PORT = 8000
AGENT = f"{PORT:016x}"
BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 6, "seed": 7}
MAX_HANG_S = 30.0
"""Far less than the timeouts below, far more than is needed."""
HUNG = [
    (True, Fault("prefill", "hang")),
    (True, Fault("decode", "hang")),
    (True, Fault("decode", "silent")),
    (True, Fault("decode", "stall", after_events=3)),
    (False, Fault("prefill", "silent")),
    (False, Fault("decode", "hang")),
]


def busy(steps: int) -> Register:
    return registration("decode", PORT, steps=steps, load=load(running=1))


async def test_requests_at_an_agent_that_hangs_are_retried_elsewhere(start_stage: StartStage) -> None:
    """I5: pings and answers end while the connection stays, as when a process is stopped."""
    stages = [await start_stage(first_byte_timeout_s=60, idle_timeout_s=60, total_timeout_s=60) for _ in HUNG]

    async def ask(index: int, stream: bool, fault: Fault) -> None:
        stage = stages[index]
        hung = (await stage.pair())[fault.leg == "decode"]

        async def answer() -> Any:
            if stream:
                streamed = await stage.stream(BODY)
                assert streamed.error is None
                return streamed.text()
            status, whole = await stage.ask(BODY)
            assert status == 200, whole
            return whole["choices"]

        undisturbed = await answer()
        while stage.proxy.services.exchanges.retry_budget.try_withdraw():
            pass  # retrying what an agent that is down has not done costs none of it
        hung.faults.append(fault)
        asking = asyncio.ensure_future(answer())
        await hung.until(lambda: not hung.faults)
        await hung.silence()
        await stage.agent(hung.role)
        assert await asking == undisturbed

    async with asyncio.timeout(MAX_HANG_S):
        await asyncio.gather(*(ask(index, *each) for index, each in enumerate(HUNG)))


@pytest.mark.parametrize(("stream", "fault"), HUNG)
async def test_a_request_at_the_only_agent_that_could_serve_it_fails(
    start_stage: StartStage, monkeypatch: pytest.MonkeyPatch, stream: bool, fault: Fault
) -> None:
    """W1: long before the deadlines, with an error that says why."""
    monkeypatch.setattr("kvferry.proxy.fleet.registry.SILENCE_S", NODE_EXPIRY_S + 1.0)
    stage = await start_stage(
        decode_only_fallback=False, first_byte_timeout_s=60, idle_timeout_s=60, total_timeout_s=60
    )
    hung = (await stage.pair())[fault.leg == "decode"]
    hung.faults.append(fault)
    asking = asyncio.ensure_future(stage.post({**BODY, "stream": stream}))
    await hung.until(lambda: not hung.faults)
    await hung.silence()
    async with asyncio.timeout(2 * NODE_EXPIRY_S), await asking as response:
        answer = await response.text()
    assert '"code":"no_agent"' in answer
    assert response.status == (200 if stream and fault.leg == "decode" else 503)


async def test_a_request_at_another_engines_only_server_fails_too(
    start_stage: StartStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W1, of every dialect whose servers expire by now: `test_other_engines_pings_are_awaited_no_longer`."""
    monkeypatch.setattr("kvferry.proxy.fleet.registry.SILENCE_S", NODE_EXPIRY_S + 1.0)
    servers = [kind for dialect, kind in SERVERS.items() if dialect not in ("atom", "vllm-moriio")]
    limits = {"first_byte_timeout_s": 60, "idle_timeout_s": 60, "total_timeout_s": 60}
    legs: tuple[Leg, ...] = ("prefill", "decode")
    cases = list(product(servers, legs, (False, True)))
    stages = [await start_stage(decode_only_fallback=False, **limits) for _ in cases]

    async def ask(stage: Stage, server: type[StandInServer], leg: Leg, stream: bool) -> str:
        fabric, where = Fabric(), (stage.discovery,)
        pair = [
            await stage.bring(server(role=role, proxies=where, fabric=fabric))
            for role in ("prefill", "decode")
        ]
        hung = pair[leg == "decode"]
        hung.faults.append(Fault(leg, "hang"))
        asking = asyncio.ensure_future(stage.post({**BODY, "stream": stream}))
        await hung.until(lambda: not hung.faults)
        await hung.silence()
        async with asyncio.timeout(3 * NODE_EXPIRY_S), await asking as response:
            return await response.text()

    answers = await asyncio.gather(*(ask(stage, *case) for stage, case in zip(stages, cases, strict=True)))
    assert all('"code":"no_agent"' in answer for answer in answers), answers


class Waiting:
    """A request at the busy agent that waits since then; counts its aborts."""

    def __init__(self, since: float | None, can_retry: bool = True) -> None:
        self.agent = busy(steps=1)
        self.waiting_since = since
        self.aborted = 0
        self._can_retry = can_retry

    def can_retry(self) -> bool:
        return self._can_retry

    def abort(self) -> None:
        self.aborted += 1
        self.waiting_since = None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    """A decode agent that pinged at second 0, with something running."""
    made = Fleet(FleetSettings(), Metrics(), clock)
    made.registry.register(busy(steps=1), 0.0)
    return made


async def is_aborted(fleet: Fleet, since: float | None, now: float, can_retry: bool = True) -> bool:
    """Whether a wait for the busy agent is aborted, once, by two checks."""
    assert isinstance(fleet.clock, Clock)
    fleet.clock.now = now
    detector, request = HangDetector(), Waiting(since, can_retry)
    detector.pending.add(request)
    detector.check(fleet.registry, now)
    detector.check(fleet.registry, now)
    assert request.aborted < 2
    return request.aborted == 1


@pytest.mark.parametrize(
    ("since", "now", "ended"),
    [
        (0.0, NODE_EXPIRY_S - 0.1, False),
        (0.0, NODE_EXPIRY_S, True),
        (1.0, NODE_EXPIRY_S, False),  # something came: only its pings are lost
        (None, NODE_EXPIRY_S, False),  # not awaited: the client reads slowly
    ],
)
async def test_only_overdue_requests_at_hung_agents_are_aborted(
    fleet: Fleet, since: float | None, now: float, ended: bool
) -> None:
    fleet.registry.register(registration("decode", PORT + 1), now)
    assert await is_aborted(fleet, since, now) == ended


@pytest.mark.parametrize(
    ("other", "ended"),
    [
        (registration("decode", PORT + 1), True),
        (registration("both", PORT + 1), True),
        (registration("prefill", PORT + 1), False),
        (registration("decode", PORT + 1, model="another"), False),
        (registration("decode", PORT + 1, dialect="sglang"), False),
        (registration("decode", PORT + 1, state="draining"), False),
        (None, False),
    ],
)
async def test_without_an_alternative_the_request_waits(
    fleet: Fleet, other: Register | None, ended: bool
) -> None:
    """It may only be slow, or its pings be late."""
    if other is not None:
        fleet.registry.register(other, NODE_EXPIRY_S)
    assert await is_aborted(fleet, 0.0, NODE_EXPIRY_S) == ended


async def test_a_request_that_cannot_be_retried_waits(fleet: Fleet) -> None:
    """It could only fail, and the agent may come back."""
    fleet.registry.register(registration("decode", PORT + 1), NODE_EXPIRY_S)
    assert not await is_aborted(fleet, 0.0, NODE_EXPIRY_S, can_retry=False)
    assert await is_aborted(fleet, 0.0, NODE_EXPIRY_S)


@pytest.mark.parametrize("can_retry", [True, False])
@pytest.mark.parametrize(
    ("since", "now", "ended"),
    [
        (0.0, SILENCE_S - 0.1, False),
        (0.0, SILENCE_S, True),
        (SILENCE_S - NODE_EXPIRY_S + 0.1, SILENCE_S, False),  # something came: only its pings are lost
        (None, SILENCE_S, False),
    ],
)
async def test_a_long_silence_ends_all_that_wait(
    fleet: Fleet, since: float | None, now: float, ended: bool, can_retry: bool
) -> None:
    """W1: also where nobody else can do it, so that no client waits for an agent that is gone."""
    assert await is_aborted(fleet, since, now, can_retry) == ended


@pytest.mark.parametrize("dialect", ["native", "atom", "vllm-moriio", "vllm-kvferry"])
async def test_other_engines_pings_are_awaited_no_longer(clock: Clock, dialect: str) -> None:
    """They come every 3 or 5 seconds; an agent that has missed one is given up before it expires."""
    made = Fleet(FleetSettings(), Metrics(), clock)
    made.registry.register(registration("decode", PORT, dialect=dialect), 0.0)
    assert not await is_aborted(made, 0.0, SILENCE_S - 0.1)
    assert await is_aborted(made, 0.0, SILENCE_S)


async def test_an_agent_that_pings_is_waited_for(fleet: Fleet) -> None:
    """A long prefill, alone in the fleet."""
    for second in range(3 * int(STALL_S)):
        fleet.registry.register(busy(steps=1), second)
        assert not await is_aborted(fleet, 0.0, second + 0.9)


async def test_an_agent_that_said_bye_is_waited_for(fleet: Fleet) -> None:
    """It may be serving its last requests."""
    fleet.registry.bye(busy(steps=1).incarnation)
    assert not await is_aborted(fleet, 0.0, 10 * SILENCE_S)


async def test_requests_at_a_stalled_engine_are_aborted_too(fleet: Fleet) -> None:
    for second in range(int(STALL_S)):
        fleet.registry.register(registration("decode", PORT + 1), second)
        assert not await is_aborted(fleet, 0.0, second)
        fleet.registry.register(busy(steps=1), second)
    assert await is_aborted(fleet, 0.0, STALL_S)
    fleet.registry.register(busy(steps=2), STALL_S)
    assert not await is_aborted(fleet, 0.0, STALL_S)


async def test_a_pause_of_the_proxy_itself_aborts_nothing(
    fleet: Fleet, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it wakes, the pings of that time are still to be read."""
    monkeypatch.setattr("kvferry.proxy.http.hang_detector.CHECK_INTERVAL_S", 0.0)
    detector, request, registry = HangDetector(), Waiting(0.0), fleet.registry
    detector.pending.add(request)
    watching = asyncio.ensure_future(detector.run(registry, clock))
    await asyncio.sleep(0.01)  # it has noted the time
    clock.now = woke = 60.0
    while not request.aborted:
        assert clock.now < woke + 2 * NODE_EXPIRY_S
        registry.register(registration("decode", PORT + 1))
        await asyncio.sleep(0.01)
        clock.now += 0.5
    assert clock.now > woke + NODE_EXPIRY_S
    watching.cancel()


@pytest.mark.parametrize("expired", [False, True])
async def test_no_silence_is_counted_while_the_proxy_pauses(
    fleet: Fleet, clock: Clock, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    """Nor of an agent that was gone already: it may have come back meanwhile."""
    monkeypatch.setattr("kvferry.proxy.http.hang_detector.CHECK_INTERVAL_S", 0.0)
    detector, request, registry = HangDetector(), Waiting(0.0), fleet.registry
    detector.pending.add(request)
    watching = asyncio.ensure_future(detector.run(registry, clock))
    silent_s = NODE_EXPIRY_S + 0.5 if expired else 1.0
    while clock.now < silent_s:
        await asyncio.sleep(0.01)
        clock.now += 0.5
    registry.sweep()
    assert registry.is_alive(busy(steps=1).incarnation) is not expired
    clock.now += 60.0
    woke = clock.now
    while not request.aborted:
        assert clock.now < woke + 2 * SILENCE_S
        await asyncio.sleep(0.01)
        clock.now += 0.5
    assert clock.now > woke + SILENCE_S - silent_s - 0.6
    watching.cancel()
