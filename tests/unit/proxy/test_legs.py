# SPDX-License-Identifier: Apache-2.0
"""An agent that hangs: its legs go elsewhere long before a deadline for silence, and no other is harmed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.legs import LOOK_INTERVAL_S, Legs
from proxy.registry import STALL_S, Registry
from proxy.wire import NODE_EXPIRY_S, Register
from tests.standins.agents import Fault
from tests.unit.proxy.builders import load, registration
from tests.unit.proxy.conftest import StartStage

PORT = 8000
AGENT = f"{PORT:016x}"
BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 6, "seed": 7}
MAX_HANG_S = 30.0
"""Far less than the deadlines for silence below, far more than is needed."""
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


async def test_what_an_agent_that_hangs_was_asked_goes_elsewhere(start_stage: StartStage) -> None:
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
        while stage.proxy.services.retry_budget.take():
            pass  # moving what an idle agent has not done costs none of it
        hung.faults.append(fault)
        asking = asyncio.ensure_future(answer())
        await hung.until(lambda: not hung.faults)
        await hung.silence()
        await stage.agent(hung.role)
        assert await asking == undisturbed

    async with asyncio.timeout(MAX_HANG_S):
        await asyncio.gather(*(ask(index, *each) for index, each in enumerate(HUNG)))


class Read:
    """A wait that began at `since`; notes whether it was ended."""

    def __init__(self, since: float | None) -> None:
        self.since = since
        self.ended = 0

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def registry() -> Registry:
    """A decode agent heard at second 0 with something running."""
    made = Registry()
    made.register(busy(steps=1), 0.0)
    return made


def looked_at(registry: Registry, since: float | None, now: float, movable: bool = True) -> bool:
    """Whether a wait for the busy agent is ended, once, when all legs are looked at twice."""
    legs, wait = Legs(), Read(since)
    with legs.open(busy(steps=1), lambda: movable) as leg, leg.watched(wait):
        legs.look(registry, now)
        legs.look(registry, now)
        assert leg.given_up == bool(wait.ended)
    assert wait.ended < 2
    return wait.ended == 1


@pytest.mark.parametrize(
    ("since", "now", "ended"),
    [
        (0.0, NODE_EXPIRY_S - 0.1, False),
        (0.0, NODE_EXPIRY_S, True),
        (1.0, NODE_EXPIRY_S, False),  # something came: only its pings are lost
        (None, NODE_EXPIRY_S, False),  # nobody waits: the client reads slowly
    ],
)
def test_only_quiet_legs_of_lost_agents_are_given_up(
    registry: Registry, since: float | None, now: float, ended: bool
) -> None:
    registry.register(registration("decode", PORT + 1), now)
    assert looked_at(registry, since, now) == ended


@pytest.mark.parametrize(
    ("other", "ended"),
    [
        (registration("decode", PORT + 1), True),
        (registration("both", PORT + 1), True),
        (registration("prefill", PORT + 1), False),
        (registration("decode", PORT + 1, model="another"), False),
        (registration("decode", PORT + 1, state="draining"), False),
        (busy(steps=1), False),
    ],
)
def test_where_nobody_else_serves_an_agent_is_waited_for(
    registry: Registry, other: Register, ended: bool
) -> None:
    """It may only be slow, and the deadlines hold all the same."""
    now = NODE_EXPIRY_S
    if other.incarnation != AGENT:
        registry.register(other, now)
    assert looked_at(registry, 0.0, now) == ended


def test_a_leg_that_may_not_go_elsewhere_waits(registry: Registry) -> None:
    """A request without another try would only fail sooner."""
    registry.register(registration("decode", PORT + 1), NODE_EXPIRY_S)
    assert not looked_at(registry, 0.0, NODE_EXPIRY_S, movable=False)
    assert looked_at(registry, 0.0, NODE_EXPIRY_S)


def test_an_engine_that_stands_still_for_long_is_given_up_too(registry: Registry) -> None:
    for second in range(int(STALL_S)):
        registry.register(registration("decode", PORT + 1), second)
        assert not looked_at(registry, 0.0, second)
        registry.register(busy(steps=1), second)
    assert looked_at(registry, 0.0, STALL_S)
    registry.register(busy(steps=2), STALL_S)
    assert not looked_at(registry, 0.0, STALL_S)


async def test_a_pause_of_the_proxy_itself_is_held_against_nobody(registry: Registry) -> None:
    """When it wakes, the pings of that time are still to be read."""
    registry.register(registration("decode", PORT + 1), 60.0)
    times = iter([0.0, 60.0])
    asked_twice = asyncio.Event()

    def clock() -> float:
        now = next(times, None)
        if now is None:
            asked_twice.set()
            return 60.0 + LOOK_INTERVAL_S
        return now

    legs, wait = Legs(), Read(0.0)
    watching = asyncio.ensure_future(legs.run(registry, clock))
    with legs.open(busy(steps=1), lambda: True) as leg, leg.watched(wait):
        await asyncio.sleep(1.5 * LOOK_INTERVAL_S)
        assert not leg.given_up and not asked_twice.is_set()
        async with asyncio.timeout(5):
            await asked_twice.wait()
            while not leg.given_up:
                await asyncio.sleep(0.01)
    watching.cancel()
