# SPDX-License-Identifier: Apache-2.0
"""What is kept of who has room is what a look at all agents finds, and it costs the same in a large fleet."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proxy.fleet.candidates import MAX_SIZES, Openings, Search
from kvferry.proxy.fleet.load import Candidates, Loads, Slots
from kvferry.proxy.fleet.policy import PolicyName
from kvferry.proxy.fleet.registry import Leg, Node, Registry
from kvferry.proxy.fleet.router import NoPair, Pair, Router, make_policy
from kvferry.proxy.fleet.routing_request import RoutingRequest
from kvferry.proxy.wire.registration import Incarnation, Register
from tests.unit.proxy.builders import TimedRegistry, load, registration
from tests.unit.proxy.fleet.test_groups import AGENTS, INCARNATIONS

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ping", "ping", "load", "bye", "drain", "failed", "acquire", "acquire", "release"]),
        st.integers(0, 5),
        AGENTS,
        st.integers(0, 3),
    ),
    max_size=40,
)
MAX_RUNNING = 3
POLICIES: list[PolicyName] = ["round_robin", "least_loaded", "power_of_two", "prefix_aware", "session"]


def told(candidates: Candidates) -> list[tuple[str, int]]:
    return [(node.info.incarnation, candidates.load(node)) for node in candidates]


def assert_same(kept: Candidates, found: Candidates) -> None:
    assert told(kept) == told(found)
    for turn in range(3):
        if found:
            assert kept.least_loaded(turn) == found.least_loaded(turn)
            assert kept[turn % len(kept)] == found[turn % len(found)]
    wanted = [Incarnation(each) for each in INCARNATIONS[::2]]
    assert kept.find(wanted) == found.find(wanted)
    if kept.pool is not None:
        assert {node.incarnation for node in found} <= {node.incarnation for node in kept.in_pool()}


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40))
def test_what_is_kept_is_what_a_search_finds(steps: list[Any], sizes: list[int]) -> None:
    """After any history, for any number of choices."""
    slots, taken = Slots(), list[Incarnation]()
    loads, registry = (
        Loads(slots, {"prefill": None, "decode": None}),
        TimedRegistry(in_flight=slots.in_flight),
    )
    openings, known = Openings(loads), dict[int, Register]()
    for index, ((what, at, fields, number), n) in enumerate(zip(steps, sizes, strict=False)):
        agent = Incarnation(INCARNATIONS[at])
        running = load(number, max_running=MAX_RUNNING)
        match what:
            case "ping":
                known[at] = registration(port=100 + at, **fields, index=index, load=running)
                registry.register(known[at])
            case "load" if at in known:
                registry.register(msgspec.structs.replace(known[at], index=index, load=running))
            case "bye":
                registry.bye(agent)
            case "drain":
                registry.drain(agent, bool(number % 2))
            case "failed":
                for _ in range(5):
                    registry.leg_failed(agent)
            case "acquire":
                slots.acquire(agent, 1)
                taken.append(agent)
            case "release" if taken:
                slots.release(taken.pop(number % len(taken)), 1)
        snapshot = registry.snapshot()
        openings.follow(snapshot)
        search = Search(snapshot, loads)
        for model in ("m", "o"):
            prefills = search.prefills(model, n)
            assert_same(openings.prefills(model, n), prefills)
            for prefill in prefills:
                assert_same(openings.partners(prefill, n), search.partners(prefill, n))
            legs: tuple[Leg, ...] = ("prefill", "decode")
            for leg in legs:
                assert_same(openings.lone(model, leg, n), search.lone(model, leg, n))


def fleet(agents: int, policy: PolicyName) -> tuple[Registry, Router, Slots]:
    slots = Slots()
    registry, loads = (
        TimedRegistry(in_flight=slots.in_flight),
        Loads(slots, {"prefill": None, "decode": None}),
    )
    router = Router(make_policy(policy, Random(1)), make_policy(policy, Random(2)), loads)
    for at in range(agents):
        registry.register(agent(at))
    return registry, router, slots


def agent(at: int, **fields: Any) -> Register:
    return registration("decode" if at % 2 else "prefill", 100 + at, load=load(max_running=4), **fields)


def request(number: int) -> RoutingRequest:
    return RoutingRequest(
        model="m",
        prompt=f"{number % 7}" * 400,
        n=1 + number % 2,
        session=f"{number % 5}" if number % 3 else None,
        one_token=number % 11 == 0,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_chooses_alike_among_openings_and_by_a_search(policy: PolicyName) -> None:
    rng = Random(3)
    sides = [fleet(20, policy) for _ in range(2)]
    held: list[list[Pair]] = []
    for number in range(300):
        if held and (len(held) > 30 or rng.random() < 0.3):
            pairs = held.pop(rng.randrange(len(held)))
            for (_, _, slots), pair in zip(sides, pairs, strict=True):
                for node in pair.nodes:
                    slots.release(node.incarnation, 1)
        if rng.random() < 0.2:
            at, drained = rng.randrange(20), rng.random() < 0.5
            for registry, _, _ in sides:
                registry.drain(Incarnation(f"{100 + at:016x}"), drained)
        snapshots = [registry.snapshot() for registry, _, _ in sides]
        snapshots[1] = snapshots[1].altered(snapshots[1].nodes)
        chosen = [
            router.choose(snapshot, request(number))
            for snapshot, (_, router, _) in zip(snapshots, sides, strict=True)
        ]
        if isinstance(chosen[0], NoPair):
            assert chosen[1] is chosen[0]
            continue
        assert [ids(each) for each in chosen] == [ids(chosen[0])] * 2
        for (_, _, slots), pair in zip(sides, chosen, strict=True):
            assert isinstance(pair, Pair)
            for node in pair.nodes:
                slots.acquire(node.incarnation, 1)
        held.append(chosen)  # type: ignore[arg-type]


def ids(pair: Pair | NoPair) -> list[str]:
    assert isinstance(pair, Pair)
    return [node.info.incarnation for node in (pair.prefill, pair.decode)]


class Looks:
    """Counts the agents that are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        at: Callable[[Loads, Node], int] = Loads.at

        def counted(loads: Loads, node: Node) -> int:
            self.count += 1
            return at(loads, node)

        monkeypatch.setattr(Loads, "at", counted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_full", [False, True], ids=["with room", "full"])
def test_a_request_looks_at_no_more_agents_in_a_large_fleet(
    policy: PolicyName, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: the cost of choosing a pair was that of the fleet, also for each ping while requests waited."""
    work = {}
    for agents in (20, 1000):
        registry, router, slots = fleet(agents, policy)
        if is_full:
            for at in range(agents):
                slots.acquire(Incarnation(f"{100 + at:016x}"), 4)
        asked = [RoutingRequest(model="m", prompt="x" * 400, session="s") for _ in range(50)]
        router.choose(registry.snapshot(), asked[0])
        looks = Looks(monkeypatch)
        for number, each in enumerate(asked):
            full = msgspec.structs.replace(agent(number % 20), index=number + 2)
            registry.register(full)
            pair = router.choose(registry.snapshot(), each)
            assert isinstance(pair, Pair) != is_full
            if isinstance(pair, Pair):
                for node in pair.nodes:
                    slots.acquire(node.incarnation, 1)
                    slots.release(node.incarnation, 1)
        work[agents] = looks.count
        monkeypatch.undo()
    assert work[1000] <= work[20] * 1.1


def test_openings_are_kept_for_few_numbers_of_choices() -> None:
    registry, _, slots = fleet(20, "round_robin")
    openings = Openings(Loads(slots, {"prefill": None, "decode": None}))
    openings.follow(registry.snapshot())
    for n in range(1, 20):
        assert openings.prefills("m", n) is not None
        openings.lone("m", "decode", n)
    assert len(openings._pairs) == len(openings._lone) == MAX_SIZES
