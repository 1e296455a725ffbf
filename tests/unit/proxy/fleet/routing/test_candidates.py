# SPDX-License-Identifier: Apache-2.0
"""What is kept of who has room is what a look at all agents finds, and it costs the same in a large fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proxy.fleet.pairing import Leg, mismatch
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.fleet.routing.candidates import (
    MAX_SIZES,
    CandidateIndex,
    Candidates,
    Listed,
    Loads,
    Slots,
    no_pair,
)
from kvferry.proxy.fleet.routing.policy import PolicyName
from kvferry.proxy.fleet.routing.router import Decision, Turns
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import Node, Snapshot
from kvferry.proxy.wire.dialects import serves_alone
from kvferry.proxy.wire.registration import Incarnation, Register
from tests.unit.proxy.builders import AppliedRouter, TimedRegistry, load, registration
from tests.unit.proxy.fleet.test_pairing import AGENTS, INCARNATIONS

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
NO_LIMITS: dict[Leg, int | None] = {"prefill": None, "decode": None}
POLICIES: list[PolicyName] = ["least_work", "round_robin", "prefix_aware", "session"]


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


class Scan:
    """What a look at every two agents finds."""

    def __init__(self, snapshot: Snapshot, loads: Loads) -> None:
        self._nodes = snapshot.nodes
        self._loads = loads

    def prefills(self, model: str, n: int, *, apart: bool = False) -> Candidates:
        able = self._ready(model, "prefill", 1)
        return self._listed(node for node in able if self._fitting(node, n, apart=apart))

    def partners(self, prefill: Node, n: int, *, apart: bool = False) -> Candidates:
        return self._listed(self._fitting(prefill, n, apart=apart))

    def lone(self, model: str, leg: Leg, n: int) -> Candidates:
        ready = self._ready(model, leg, n)
        return self._listed(node for node in ready if serves_alone(node.info.dialect, leg))

    def _fitting(self, prefill: Node, n: int, *, apart: bool) -> list[Node]:
        return [
            node
            for node in self._ready(prefill.info.model, "decode", n)
            if mismatch(prefill.info, node.info) is None and not (apart and node is prefill)
        ]

    def _ready(self, model: str, leg: Leg, count: int) -> Iterator[Node]:
        for node in self._nodes:
            if node.serves(leg) and node.info.model == model and self._loads.has_room(node, leg, count):
                yield node

    def _listed(self, nodes: Iterable[Node]) -> Candidates:
        return Listed(list(nodes), self._loads.at)


@settings(max_examples=200, deadline=None)
@given(
    steps=STEPS,
    sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
    excluded=st.frozensets(st.sampled_from(INCARNATIONS), max_size=2),
)
def test_what_is_kept_is_what_a_scan_finds(
    steps: list[Any], sizes: list[int], excluded: frozenset[str]
) -> None:
    """After any history, for any number of choices, also for a request that some agents are kept from."""
    slots, taken = Slots(), list[Incarnation]()
    loads, registry = Loads(slots, NO_LIMITS), TimedRegistry(in_flight=slots.in_flight)
    index, known = CandidateIndex(loads), dict[int, Register]()
    for number, ((what, at, fields, some), n) in enumerate(zip(steps, sizes, strict=False)):
        agent = Incarnation(INCARNATIONS[at])
        running = load(some, max_running=MAX_RUNNING)
        match what:
            case "ping":
                known[at] = registration(port=100 + at, **fields, index=number, load=running)
                registry.register(known[at])
            case "load" if at in known:
                registry.register(msgspec.structs.replace(known[at], index=number, load=running))
            case "bye":
                registry.bye(agent)
            case "drain":
                registry.cordon(agent, bool(some % 2))
            case "failed":
                for _ in range(5):
                    registry.leg_failed(agent)
            case "acquire":
                slots.acquire(agent, 1)
                taken.append(agent)
            case "release" if taken:
                slots.release(taken.pop(some % len(taken)), 1)
        snapshot = registry.snapshot()
        if some == 3:
            continue  # some snapshots are of pages, and nobody routes by them
        others = snapshot.only(lambda node: node.incarnation not in excluded)
        for agents in (others, snapshot) if number % 3 == 0 else (snapshot,):
            assert_finds_the_same(index, agents, loads, n)


def assert_finds_the_same(index: CandidateIndex, agents: Snapshot, loads: Loads, n: int) -> None:
    index.follow(agents)
    scan = Scan(agents, loads)
    for model in ("m", "o"):
        for apart in (False, True):
            prefills = scan.prefills(model, n, apart=apart)
            assert_same(index.prefills(model, n, apart=apart), prefills)
            for prefill in prefills:
                found = scan.partners(prefill, n, apart=apart)
                assert_same(index.partners(prefill, n, apart=apart), found)
            assert index.reason(model, apart=apart) == no_pair(agents, model, apart=apart)
        legs: tuple[Leg, ...] = ("prefill", "decode")
        for leg in legs:
            assert_same(index.lone(model, leg, n), scan.lone(model, leg, n))


def fleet(agents: int, policy: PolicyName) -> tuple[Registry, AppliedRouter, Slots]:
    slots = Slots()
    registry, loads = (
        TimedRegistry(in_flight=slots.in_flight),
        Loads(slots, NO_LIMITS),
    )
    router = AppliedRouter(policy, policy, loads)
    for at in range(agents):
        registry.register(agent(at))
    return registry, router, slots


def agent(at: int, **fields: Any) -> Register:
    return registration("decode" if at % 2 else "prefill", 100 + at, load=load(max_running=4), **fields)


def test_an_agent_that_is_no_partner_of_its_own_has_one_when_a_second_comes() -> None:
    """SGLang's servers of both roles fit each other, and none serves alone."""
    slots, registry = Slots(), TimedRegistry()
    loads = Loads(slots, NO_LIMITS)
    index = CandidateIndex(loads)
    for at in (100, 101, 102):
        registry.register(registration("both", at, dialect="sglang"))
    for cordoned, number in ((0, 3), (2, 0), (1, 2), (2, 0), (3, 0), (2, 0), (1, 2), (0, 3)):
        for at in range(3):
            registry.cordon(Incarnation(f"{100 + at:016x}"), at < cordoned)
        index.follow(registry.snapshot())
        assert len(index.prefills("m", 1)) == number
        assert_finds_the_same(index, registry.snapshot(), loads, 1)


def test_choosing_changes_nothing_and_applying_does() -> None:
    """Asked twice, the router answers twice the same; a turn is over only once its decision is acted on."""
    registry, router, _ = fleet(6, "round_robin")
    agents, turns, asked = registry.snapshot(), Turns(), RoutingRequest(model="m")
    first, again = (router.choose(agents, asked, turns) for _ in range(2))
    assert isinstance(first, Decision) and first == again
    router.apply(first, asked, turns, agents.models)
    then = router.choose(agents, asked, turns)
    assert isinstance(then, Decision) and then.pair.prefill != first.pair.prefill


def test_no_policy_learns_from_a_question() -> None:
    registry, router, _ = fleet(6, "prefix_aware")
    agents, turns = registry.snapshot(), Turns()
    asked = RoutingRequest(model="m", prompt="x" * 4000)
    for _ in range(5):
        assert isinstance(router.choose(agents, asked, turns), Decision)
    for each in router._policies.values():
        assert all(each.cached_tokens(node, asked) == 0 for node in agents.nodes)


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
        router.route(registry.snapshot(), asked[0])
        looks = Looks(monkeypatch)
        for number, each in enumerate(asked):
            full = msgspec.structs.replace(agent(number % 20), index=number + 2)
            registry.register(full)
            pair = router.route(registry.snapshot(), each)
            assert isinstance(pair, Pair) != is_full
            if isinstance(pair, Pair):
                for node in pair.nodes:
                    slots.acquire(node.incarnation, 1)
                    slots.release(node.incarnation, 1)
        work[agents] = looks.count
        monkeypatch.undo()
    assert work[1000] <= work[20] * 1.1


def test_candidates_are_kept_for_few_numbers_of_choices() -> None:
    registry, _, slots = fleet(20, "round_robin")
    index = CandidateIndex(Loads(slots, NO_LIMITS))
    index.follow(registry.snapshot())
    for n in range(1, 20):
        assert index.prefills("m", n) is not None
        index.lone("m", "decode", n)
    assert len(index._pairs) == len(index._lone) == MAX_SIZES
