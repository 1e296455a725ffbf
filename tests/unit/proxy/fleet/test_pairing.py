# SPDX-License-Identifier: Apache-2.0
"""Routing by groups accepts what comparing every two agents accepts, without comparing them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proxy.fleet import pairing
from kvferry.proxy.fleet.circuit_breaker import BreakerState
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet, FleetSettings
from kvferry.proxy.fleet.pairing import Kind, Matching, Mismatch, Pairing, difference, mismatch, reason
from kvferry.proxy.fleet.registry import STALL_S, SnapshotCache
from kvferry.proxy.fleet.routing.candidates import Loads, Slots, no_pair
from kvferry.proxy.fleet.routing.router import Decision
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import (
    Node,
    NodeState,
    NoPair,
    Snapshot,
    UnpairedReasons,
    alike,
    count_incompatible,
    incompatible_pairs,
)
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Incarnation
from tests.unit.proxy.builders import AppliedRouter, TimedRegistry, load, registration, snapshot

INCARNATIONS = [f"{port:016x}" for port in range(100, 108)]
AGENTS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["prefill", "decode", "both"]),
        "dialect": st.sampled_from(
            ["native", "native", "native", "atom", "vllm-nixl", "sglang", "unheard-of"]
        ),
        "model": st.sampled_from(["m", "m", "m", "o"]),
        "weights": st.sampled_from("vvvw"),
        "tokenizer": st.sampled_from("tttu"),
        "layout": st.sampled_from("lllk"),
        "transfer_mode": st.sampled_from(["read", "read", "read", "write"]),
        "transfers": st.lists(st.sampled_from(["tcp", "nixl", "cuda_ipc"]), max_size=3).map(tuple),
        "host_id": st.sampled_from("hi"),
        "control_versions": st.sampled_from([(1, 1), (1, 1), (1, 2), (2, 3)]),
        "refusals": st.dictionaries(st.sampled_from([*INCARNATIONS, "gone"]), st.just("why"), max_size=2),
    }
)
STATES = st.sampled_from([NodeState.READY] * 4 + [NodeState.DRAINING, NodeState.TRIPPED])


@st.composite
def fleets(draw: st.DrawFn) -> Snapshot:
    agents = draw(st.lists(st.tuples(AGENTS, STATES), max_size=len(INCARNATIONS)))
    infos = [registration(port=100 + at, **fields) for at, (fields, _) in enumerate(agents)]
    made = snapshot(*infos)
    nodes = tuple(
        replace(node, state=state, breaker=BreakerState.HALF_OPEN)
        for node, (_, state) in zip(made.nodes, agents, strict=True)
    )
    return replace(made, nodes=nodes)


@given(agents=fleets(), data=st.data())
def test_pairs_that_the_canary_has_taken_out_are_apart(agents: Snapshot, data: st.DataObject) -> None:
    infos = [node.info for node in agents.nodes]
    names = st.sampled_from([info.incarnation for info in infos] or [Incarnation("gone")])
    drawn = data.draw(st.frozensets(st.tuples(names, names), max_size=3))
    out = {(prefill, decode) for prefill, decode in drawn if prefill != decode}
    before, after = Pairing(infos), Pairing(infos, out)
    for ours, prefill in enumerate(infos):
        if prefill.role not in ("prefill", "both"):
            continue
        expected = [
            each
            for each in before.partners(ours, "prefill")
            if (prefill.incarnation, infos[each].incarnation) not in out
        ]
        assert list(after.partners(ours, "prefill")) == expected
        for theirs in before.partners(ours, "prefill"):
            why = None if theirs in expected else Mismatch.CANARY
            assert theirs == ours or after.why(ours, theirs) is why
    every = replace(agents, pairing=after)
    listed = Counter(pair.why for pair in incompatible_pairs(every))
    assert count_incompatible(every) == listed


def fitting(agents: Snapshot, model: str, apart: bool) -> dict[str, list[str]]:
    """The partners of each prefill agent that has any, by comparing every two."""
    partners = {
        prefill.info.incarnation: [
            decode.info.incarnation
            for decode in agents.nodes
            if decode.serves("decode")
            and decode.info.model == model
            and mismatch(prefill.info, decode.info) is None
            and not (apart and decode is prefill)
        ]
        for prefill in agents.nodes
        if prefill.serves("prefill") and prefill.info.model == model
    }
    return {key: fits for key, fits in partners.items() if fits}


@settings(max_examples=300)
@given(agents=fleets(), apart=st.booleans())
def test_kinds_accept_exactly_the_pairs_that_mismatch_accepts(agents: Snapshot, apart: bool) -> None:
    matching = Matching(agents.pairing, "prefill", agents.up("decode"), apart=apart)
    reverse = Matching(agents.pairing, "decode", agents.up("prefill"), apart=apart)
    ids = [node.info.incarnation for node in agents.nodes]
    for model in ("m", "o"):
        there = [each for each in agents.up("prefill") if agents.nodes[each].info.model == model]
        found = {ids[each]: [ids[other] for other in matching.partners(each)] for each in there}
        assert {key: fits for key, fits in found.items() if fits} == fitting(agents, model, apart)
        assert all(matching.has_partner(each) == bool(matching.partners(each)) for each in there)
    for decode in agents.up("decode"):
        theirs = [each for each in agents.up("prefill") if decode in matching.partners(each)]
        assert reverse.partners(decode) == theirs
        assert reverse.has_partner(decode) == bool(theirs)
    for one, prefill in enumerate(agents.nodes):
        for other, decode_node in enumerate(agents.nodes):
            assert agents.pairing.why(one, other) is mismatch(prefill.info, decode_node.info)


@settings(max_examples=200)
@given(
    agents=fleets(),
    apart=st.booleans(),
    excluded=st.frozensets(st.sampled_from(INCARNATIONS), max_size=2),
    like=st.integers(0, 20),
)
def test_the_router_uses_all_these_pairs_evenly_and_no_others(
    agents: Snapshot, apart: bool, excluded: frozenset[str], like: int
) -> None:
    if like < len(agents.nodes):
        agent = agents.nodes[like].info
        agents = alike(agents, agent)
        kind = (agent.weights, agent.tokenizer, agent.layout)
        ready = [node.info for node in agents.nodes if node.state is NodeState.READY]
        assert all((each.weights, each.tokenizer, each.layout) == kind for each in ready)
    router = AppliedRouter(
        "round_robin",
        "round_robin",
        Loads(Slots(), {"prefill": None, "decode": None}),
    )
    kept = tuple(node for node in agents.nodes if node.incarnation not in excluded)
    expected = fitting(Snapshot.of(kept, agents.models), "m", apart) or fitting(agents, "m", apart)
    rounds = len(expected) * max((len(each) for each in expected.values()), default=1)
    used: Counter[tuple[str, str]] = Counter()
    exclude = frozenset(map(Incarnation, excluded))
    for _ in range(rounds or 1):
        pair = router.route(agents, RoutingRequest(model="m"), exclude, apart=apart)
        if isinstance(pair, Pair):
            used[pair.prefill.info.incarnation, pair.decode.info.incarnation] += 1
            assert pair.decode.info.incarnation in expected[pair.prefill.info.incarnation]
    assert bool(used) == bool(expected)
    shares = Counter(prefill for prefill, _ in used.elements())
    assert shares.keys() == expected.keys() and len(set(shares.values())) <= 1
    if not apart and not excluded:
        assert (no_pair(agents, "m") is None) == bool(expected)


def pairwise_not_paired(node: Node, agents: Snapshot) -> str | None:
    """What /nodes shows of an agent, by comparing it with every other."""
    if node.info.dialect in ("unheard-of",):
        return Mismatch.DIALECT.value
    if node.state is not NodeState.READY:
        return f"its state is {node.state.value}"
    found: list[str | None] = []
    for leg in ("prefill", "decode"):
        for other in agents.nodes if node.info.role in (leg, "both") else ():
            if other.serves("decode" if leg == "prefill" else "prefill"):
                one, another = (node, other) if leg == "prefill" else (other, node)
                why = mismatch(one.info, another.info)
                found.append(None if why is None else reason(one.info, another.info, why))
    if not found:
        return f"no {'decode' if node.info.role == 'prefill' else 'prefill'} agent is ready"
    return None if None in found else found[0]


@settings(max_examples=200)
@given(agents=fleets())
def test_the_reasons_are_those_that_comparing_every_two_gives(agents: Snapshot) -> None:
    expected = [
        (prefill.info, decode.info, why)
        for prefill in agents.nodes
        for decode in agents.nodes
        if prefill.info.model == decode.info.model and prefill.serves("prefill") and decode.serves("decode")
        if (why := mismatch(prefill.info, decode.info)) is not None
    ]
    assert list(incompatible_pairs(agents)) == expected
    assert count_incompatible(agents) == Counter(why for _, _, why in expected)
    unpaired = UnpairedReasons(agents)
    assert [unpaired.not_paired(at) for at in range(len(agents.nodes))] == [
        pairwise_not_paired(node, agents) for node in agents.nodes
    ]


class Work:
    """Counts comparisons of two kinds, and pairings made anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.comparisons = self.regroupings = 0

        def counted(prefill: Kind, decode: Kind) -> Mismatch | None:
            self.comparisons += 1
            return difference(prefill, decode)

        made = pairing.Pairing.__init__

        def counted_init(this: pairing.Pairing, *arguments: Any) -> None:
            self.regroupings += 1
            made(this, *arguments)

        monkeypatch.setattr(pairing, "difference", counted)
        monkeypatch.setattr(pairing.Pairing, "__init__", counted_init)


@pytest.mark.parametrize("agents", [2, 20, 200])
def test_a_request_compares_no_agents_while_nothing_has_changed(
    agents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: the work was P x D comparisons for every request and ping."""
    registry, work = TimedRegistry(), Work(monkeypatch)
    loads = Loads(Slots(), {"prefill": None, "decode": None})
    router = AppliedRouter("round_robin", "round_robin", loads)
    infos = [registration("decode" if at % 2 else "prefill", 100 + at) for at in range(agents)]
    for info in infos:
        registry.register(info)
    registry.snapshot()
    for index in range(2, 12):
        registry.register(msgspec.structs.replace(infos[0], index=index, load=load(index)))
        assert isinstance(router.route(registry.snapshot(), RoutingRequest(model="m")), Pair)
        assert registry.snapshot() is registry.snapshot()
        assert not count_incompatible(registry.snapshot())
    assert (work.comparisons, work.regroupings) == (0, 1)
    registry.register(msgspec.structs.replace(infos[0], index=12, layout="other"))
    misfits = count_incompatible(registry.snapshot())
    assert misfits == {Mismatch.LAYOUT: agents // 2}
    assert (work.comparisons, work.regroupings) == (0, 2)


async def test_a_ping_that_repeats_what_was_known_routes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(FleetSettings(), Metrics(), lambda: 0.0)
    full = load(4, max_running=4)
    infos = [registration(role, port, load=full) for role, port in (("prefill", 1), ("decode", 2))]  # type: ignore[arg-type]
    for info in infos:
        fleet.registry.register(info)
    by = asyncio.get_running_loop().time() + 30
    request = AcquireRequest(routing_request=RoutingRequest(model="m"), by=by)
    waiter = asyncio.create_task(fleet.acquire(request))
    await asyncio.sleep(0)
    fleet.registry.register(msgspec.structs.replace(infos[0], index=2))
    calls: list[NoPair | Decision] = []
    choose = fleet.router.choose

    def counted(*args: Any, **kwargs: Any) -> NoPair | Decision:
        calls.append(choose(*args, **kwargs))
        return calls[-1]

    monkeypatch.setattr(fleet.router, "choose", counted)
    for index in range(3, 20):
        fleet.registry.register(msgspec.structs.replace(infos[0], index=index, steps=index))
    assert not calls
    for info in infos:
        fleet.registry.register(msgspec.structs.replace(info, index=20, load=load(0, max_running=4)))
    assert calls[0] is NoPair.FULL and len(calls) == 2
    hold = await waiter
    assert not isinstance(hold, NoPair)
    hold.release()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ping", "ping", "ping", "bye", "drain", "refused", "sent", "failed", "succeeded", "wait"]
        ),
        st.integers(0, 3),
        AGENTS,
        st.sampled_from([0, 0, 1]),
        st.sampled_from([0.01, 0.5, 1.0, 3.0, STALL_S - 29.0]),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(steps=STEPS)
def test_what_is_kept_between_changes_is_what_a_new_registry_would_make(steps: list[Any]) -> None:
    """The kept snapshot and groups equal those made anew, after any history, also while time passes."""
    registry, now = TimedRegistry(), 0.0
    for index, (what, at, fields, running, seconds) in enumerate(steps):
        agent = Incarnation(INCARNATIONS[at])
        match what:
            case "ping":
                info = registration(port=100 + at, **fields, index=index, load=load(running))
                registry.at(now).register(info)
            case "bye":
                registry.bye(agent)
            case "drain":
                registry.cordon(agent, bool(running))
            case "refused":
                registry.at(now).connection_refused(agent)
            case "sent":
                registry.at(now).attempt_started([agent])
            case "failed":
                for _ in range(5):
                    registry.at(now).leg_failed(agent)
            case "succeeded":
                registry.leg_succeeded(agent)
            case "wait":
                now += seconds
        kept, kept_state = registry.at(now).snapshot(), registry._cache
        registry._cache = SnapshotCache()
        fresh = registry.at(now).snapshot()
        assert kept == fresh
        assert list(incompatible_pairs(kept)) == list(incompatible_pairs(fresh))
        registry._cache = kept_state
