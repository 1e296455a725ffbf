# SPDX-License-Identifier: Apache-2.0
"""The door: who is let in, in what order, and that nobody who leaves keeps a place."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from kvferry.proxy.errors import Overloaded
from kvferry.proxy.fleet.admission import MAX_RETRY_AFTER_S, Admission, Reservation
from kvferry.proxy.fleet.routing.candidates import Loads, Slots
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import NoPair, Snapshot, Speed
from kvferry.proxy.telemetry.metrics import Metrics
from tests.unit.proxy.builders import AppliedRouter, load, registration, snapshot

ROOM = 2
"""Sequences that each agent of a `Door` runs at once."""


@dataclass(slots=True)
class Door:
    """An admission in front of one pair of agents for each of two models."""

    admission: Admission
    slots: Slots
    router: AppliedRouter
    agents: Snapshot
    holds: list[Reservation] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def enter(
        self,
        n: int = 1,
        *,
        model: str = "m",
        wait_s: float = 5.0,
        first: bool = False,
        reject_in_s: float = math.inf,
        **fields: Any,
    ) -> Reservation | NoPair:
        ask = RoutingRequest(model=model, n=n, **fields)
        now = asyncio.get_running_loop().time()
        return await self.admission.acquire(
            ask,
            lambda: self.router.route(self.agents, ask),
            by=now + wait_s,
            first=first,
            reject_at=now + reject_in_s,
        )

    def start(self, n: int = 1, **fields: Any) -> asyncio.Task[None]:
        """Enter in a task, which ends when it is in; the hold is added to `holds`."""

        async def enter() -> None:
            hold = await self.enter(n, **fields)
            assert isinstance(hold, Reservation)
            self.holds.append(hold)

        task = asyncio.get_running_loop().create_task(enter())
        self.tasks.append(task)
        return task

    async def fill(self) -> list[Reservation]:
        """Take all the room there is for model `m`."""
        holds = [await self.enter() for _ in range(ROOM)]
        return [hold for hold in holds if isinstance(hold, Reservation)]


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = make_door()
    yield made
    for hold in made.holds:
        hold.release()
    made.admission.check_integrity()
    assert made.slots.idle and not made.admission.waiting
    assert all(task.done() for task in made.tasks)


def make_door(max_waiting: int = 8) -> Door:
    each = {"load": load(max_running=ROOM)}
    agents = snapshot(
        *(registration("prefill", 100 + at, model=model, **each) for at, model in enumerate("mo")),
        *(registration("decode", 200 + at, model=model, **each) for at, model in enumerate("mo")),
    )
    slots = Slots()
    loads = Loads(slots, {"prefill": None, "decode": None})
    router = AppliedRouter("round_robin", "round_robin", loads)
    return Door(Admission(slots, Metrics(), max_waiting), slots, router, agents)


async def ticks(count: int = 5) -> None:
    """Let every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_with_room_nobody_waits_and_slots_are_by_leg(door: Door) -> None:
    hold = await door.enter(n=2)
    assert isinstance(hold, Reservation) and not hold.pair.alone
    prefill, decode = (node.incarnation for node in hold.pair.nodes)
    assert (door.slots.in_flight(prefill), door.slots.in_flight(decode)) == (1, 2)
    hold.prefill_over()
    assert (door.slots.in_flight(prefill), door.slots.in_flight(decode)) == (0, 2)
    hold.release()
    with pytest.raises(AssertionError):
        hold.release()


async def test_who_waits_is_let_in_in_order_as_places_become_free(door: Door) -> None:
    holds = await door.fill()
    tasks = [door.start() for _ in range(3)]
    await ticks()
    assert door.admission.waiting == 3
    for index, hold in enumerate(holds):
        hold.release()
        await ticks()
        assert [task.done() for task in tasks] == [at <= index for at in range(3)]
    door.holds[0].release()
    await ticks()
    assert tasks[2].done()
    door.holds.pop(0)


async def test_a_newcomer_does_not_overtake_even_if_it_needs_less(door: Door) -> None:
    """A request of two choices would starve among those of one."""
    holds = await door.fill()
    large = door.start(n=2)
    await ticks()
    holds[0].release()
    await ticks()
    small = door.start(n=1)
    await ticks()
    assert not large.done() and not small.done()
    holds[1].release()
    await ticks()
    assert large.done() and not small.done()
    door.holds.pop().release()
    await ticks()
    assert small.done()


async def order_of(door: Door, holds: list[Reservation], asked: list[dict[str, Any]]) -> list[int]:
    """Have requests wait, and free one slot after the other; returns in which order they were admitted."""
    tasks = [door.start(**fields) for fields in asked]
    await ticks()
    assert door.admission.waiting == len(asked)
    order: list[int] = []
    free = [*holds]
    for _ in asked:
        free.pop(0).release()
        await ticks()
        order += [at for at, task in enumerate(tasks) if task.done() and at not in order]
        free.append(door.holds.pop())
    for hold in free:
        hold.release()
    return order


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ([{"priority": 3}, {}, {"priority": -1}, {"priority": 3}], [2, 1, 0, 3]),
        ([{"ttft_s": 9.0}, {}, {"ttft_s": 0.5}, {"ttft_s": 9.0}], [2, 1, 0, 3]),
        ([{"ttft_s": 9.0, "priority": -1}, {"ttft_s": 0.1}, {"priority": -1, "first": True}], [2, 0, 1]),
        ([{"key": b"a"}, {"key": b"a"}, {"key": b"a"}, {"key": b"b"}], [0, 3, 1, 2]),
        ([{"prompt": [1] * size} for size in (90, 1, 900)], [0, 1, 2]),
        ([{"first": True}, {"first": True}, {}], [1, 0, 2]),
    ],
    ids=["priority", "deadline", "retry", "key", "one key", "retries"],
)
async def test_the_order_of_those_that_wait(
    door: Door, asked: list[dict[str, Any]], order: list[int]
) -> None:
    assert await order_of(door, await door.fill(), asked) == order


async def test_keys_share_by_the_tokens_of_prompts_and_of_answers(door: Door) -> None:
    """What agents report of their answers counts, as far as the client's limit lets it be."""
    speed = Speed(answer_tokens=90.0)
    door.agents = door.agents.altered(replace(node, speed=speed) for node in door.agents.nodes)
    large = [{"key": b"a", "prompt": [1] * 10, "max_tokens": 1000}] * 2
    small = [{"key": b"b", "prompt": [1] * 10, "max_tokens": 15}] * 5
    assert await order_of(door, await door.fill(), large + small) == [0, 2, 3, 4, 5, 1, 6]


@pytest.mark.parametrize("answer_tokens", [math.nan, math.inf, 1e308, -5.0])
async def test_nonsense_of_agents_changes_only_the_order(door: Door, answer_tokens: float) -> None:
    speed = Speed(answer_tokens=answer_tokens)
    door.agents = door.agents.altered(replace(node, speed=speed) for node in door.agents.nodes)
    asked = [{"key": key} for key in (b"a", b"a", b"b", b"a", b"b")]
    assert sorted(await order_of(door, await door.fill(), asked)) == [0, 1, 2, 3, 4]


async def test_one_that_goes_before_others_is_admitted_at_once_if_it_fits(door: Door) -> None:
    holds = await door.fill()
    large = door.start(n=2)
    await ticks()
    holds[0].release()
    urgent = door.start(priority=-1)
    await ticks()
    assert urgent.done() and not large.done()
    holds[1].release()
    door.holds.pop().release()
    await ticks()
    assert large.done()


@pytest.mark.parametrize(
    ("waiting", "newcomer", "leaves"),
    [
        ([{"key": b"a"}, {"key": b"a"}, {"key": b"a"}], {"key": b"b"}, 2),
        ([{"key": b"a"}, {"key": b"b"}, {"key": b"a"}], {"key": b"b"}, None),
        ([{}, {}, {}], {"ttft_s": 0.1}, None),
        ([{"priority": 2}, {}, {}], {"priority": 1}, 0),
        ([{"priority": 2}, {}, {}], {"priority": 2}, None),
        ([{"priority": 2}, {}, {}], {"priority": 3}, None),
        ([{"first": True}, {"first": True}, {"first": True}], {"priority": -9}, None),
    ],
    ids=["key", "own key", "objective", "priority", "equal", "less urgent", "retries"],
)
async def test_who_floods_a_full_queue_makes_place_for_others(
    waiting: list[dict[str, Any]], newcomer: dict[str, Any], leaves: int | None
) -> None:
    door = make_door(max_waiting=3)
    holds = await door.fill()
    tasks = [door.start(**fields) for fields in waiting]
    await ticks()
    tasks.append(door.start(**newcomer))
    await ticks()
    rejected = [at for at, task in enumerate(tasks) if task.done()]
    assert rejected == [len(waiting) if leaves is None else leaves]
    with pytest.raises(Overloaded) as refused:
        await tasks[rejected[0]]
    assert int(refused.value.headers["Retry-After"]) >= 1 and door.admission.waiting == 3
    for hold in holds:
        hold.release()
    while door.admission.waiting or door.holds:
        await ticks()
        door.holds.pop().release()
    door.admission.check_integrity()
    assert door.slots.idle


async def test_who_is_to_be_rejected_when_late_waits_no_longer(door: Door) -> None:
    holds = await door.fill()
    with pytest.raises(Overloaded, match="objective"):
        await door.enter(reject_in_s=0.01)
    assert not door.admission.waiting
    patient = door.start()
    await asyncio.sleep(0.03)
    with pytest.raises(Overloaded, match="objective"):  # at once: the one before it has waited longer
        await asyncio.wait_for(door.enter(reject_in_s=0.02, wait_s=60.0), 0.01)
    urgent = door.start(reject_in_s=0.5, ttft_s=0.5)  # goes before that one
    await ticks()
    assert door.admission.waiting == 2
    holds[0].release()
    await ticks()
    assert urgent.done() and not patient.done()
    holds[1].release()
    await ticks()


async def test_one_models_queue_does_not_hold_up_another(door: Door) -> None:
    holds = await door.fill()
    door.start()
    await ticks()
    other = await door.enter(model="o")
    assert isinstance(other, Reservation)
    other.release()
    assert door.admission.waiting == 1
    for hold in holds:
        hold.release()
    await ticks()


async def test_a_retry_goes_first_and_is_not_one_too_many() -> None:
    door = make_door(max_waiting=1)
    holds = await door.fill()
    patient = door.start()
    await ticks()
    retried = door.start(first=True)
    await ticks()
    holds[0].release()
    await ticks()
    assert retried.done() and not patient.done()
    holds[1].release()
    await ticks()
    for hold in door.holds:
        hold.release()
    assert patient.done() and door.slots.idle


@pytest.mark.parametrize("max_waiting", [0, 2])
async def test_beyond_the_queues_bound_requests_are_refused_at_once(max_waiting: int) -> None:
    door = make_door(max_waiting)
    holds = await door.fill()
    for _ in range(max_waiting):
        door.start()
    await ticks()
    with pytest.raises(Overloaded) as refused:
        await door.enter()
    assert refused.value.status == 429
    assert 1 <= int(refused.value.headers["Retry-After"]) <= MAX_RETRY_AFTER_S
    for hold in holds:
        hold.release()
    await ticks()
    for hold in door.holds:
        hold.release()
    assert door.slots.idle


async def test_who_waits_too_long_is_refused_and_leaves_the_queue(door: Door) -> None:
    holds = await door.fill()
    with pytest.raises(Overloaded):
        await door.enter(wait_s=0.01)
    assert not door.admission.waiting
    for hold in holds:
        hold.release()


async def test_without_agents_nobody_is_left_waiting(door: Door) -> None:
    holds = await door.fill()
    loop = asyncio.get_running_loop()
    waiting = loop.create_task(door.enter())
    await ticks()
    door.agents = Snapshot.of((), door.agents.models)
    door.admission.pump()
    assert await waiting is NoPair.NO_PREFILL
    for hold in holds:
        hold.release()


async def test_who_leaves_while_waiting_leaves_no_place_taken(door: Door) -> None:
    holds = await door.fill()
    leaving, staying = door.start(), door.start()
    await ticks()
    leaving.cancel()
    await ticks()
    assert door.admission.waiting == 1
    holds[0].release()
    await ticks()
    assert leaving.cancelled() and staying.done()
    holds[1].release()


async def test_the_foremost_leaving_lets_in_who_needs_less(door: Door) -> None:
    holds = await door.fill()
    large, small = door.start(n=2), door.start(n=1)
    await ticks()
    holds[0].release()
    await ticks()
    assert not small.done()
    large.cancel()
    await ticks()
    assert small.done()
    holds[1].release()


async def test_a_place_given_to_someone_who_leaves_at_that_moment_goes_to_the_next(door: Door) -> None:
    """Given in the same pass of the event loop, before its task could take it."""
    holds = await door.fill()
    leaving, staying = door.start(), door.start()
    await ticks()
    holds[0].release()  # for `leaving`, whose task has not run since
    leaving.cancel()
    await ticks()
    assert leaving.cancelled() and staying.done()
    holds[1].release()


async def test_a_place_is_not_given_to_someone_who_has_just_left(door: Door) -> None:
    """Cancelled in the same pass of the event loop, and still in the queue."""
    holds = await door.fill()
    leaving, staying = door.start(), door.start()
    await ticks()
    leaving.cancel()
    holds[0].release()
    await ticks()
    assert leaving.cancelled() and staying.done()
    holds[1].release()


class Defect(Exception):
    """What no question is meant to raise."""


def start_failing(door: Door) -> tuple[asyncio.Task[Reservation | NoPair], list[bool]]:
    """Enter in a task with a question that waits while agents are full, and then cannot be answered.

    Agents are so until the list is empty.
    """
    full = [True]

    def question() -> Pair | NoPair:
        if full:
            return NoPair.FULL
        raise Defect

    loop = asyncio.get_running_loop()
    entering = door.admission.acquire(RoutingRequest(model="m"), question, by=loop.time() + 5)
    return loop.create_task(entering), full


async def test_one_that_cannot_be_judged_fails_alone(door: Door) -> None:
    """It is judged on behalf of somebody else, who gives a place back: no other request may suffer."""
    holds = await door.fill()
    failing, full = start_failing(door)
    await ticks()
    behind = door.start()
    await ticks()
    full.clear()
    holds[0].release()
    await ticks()
    assert isinstance(failing.exception(), Defect)
    assert behind.done() and not door.admission.waiting
    holds[1].release()


async def test_one_that_leaves_as_it_fails_has_left(door: Door) -> None:
    """Both in the same pass of the event loop: what is raised in its task is that it was cancelled."""
    holds = await door.fill()
    leaving, full = start_failing(door)
    await ticks()
    full.clear()
    holds[0].release()
    leaving.cancel()
    await ticks()
    assert leaving.cancelled() and not door.admission.waiting
    holds[1].release()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_the_order_of_events_nothing_is_lost(door: Door, seed: int) -> None:
    """Requests come, leave and end at random; in the end all who stayed were in, and all is free."""
    rng = Random(seed)
    for _ in range(60):
        match rng.choice(["come", "leave", "end", "tick"]):
            case "come" if sum(not task.done() for task in door.tasks) < 8:
                priority, key = rng.choice([0, 0, -1]), rng.choice([b"", b"a", b"b"])
                model, first = rng.choice("mo"), rng.random() < 0.1
                door.start(n=rng.choice([1, 2]), model=model, first=first, priority=priority, key=key)
            case "leave" if door.tasks:
                rng.choice(door.tasks).cancel()
            case "end" if door.holds:
                door.holds.pop(rng.randrange(len(door.holds))).release()
            case _:
                await ticks(1)
        counts = {node.incarnation: door.slots.in_flight(node.incarnation) for node in door.agents.nodes}
        assert max(counts.values()) <= ROOM
    async with asyncio.timeout(20):
        while not all(task.done() for task in door.tasks):
            while door.holds:
                door.holds.pop().release()
            await ticks(1)
    assert all(task.cancelled() or task.exception() is None for task in door.tasks)


def test_a_pair_of_one_agent_is_held_once() -> None:
    node = snapshot(registration("both", 1)).nodes[0]
    hold = Reservation(Pair(node, node), 3, Admission(Slots(), Metrics(), 1).free)
    assert hold.slots() == {node.incarnation: 3}
