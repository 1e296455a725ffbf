# SPDX-License-Identifier: Apache-2.0
"""Which pair takes the next request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.fleet.circuit_breaker import BreakerState
from kvferry.proxy.fleet.fleet import FleetSettings
from kvferry.proxy.fleet.pairing import mismatch
from kvferry.proxy.fleet.routing.candidates import Loads, Slots, no_pair
from kvferry.proxy.fleet.routing.policy import PolicyName
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import NodeState, NoPair, Snapshot
from kvferry.proxy.wire.dialects import DIALECTS
from kvferry.proxy.wire.registration import Incarnation
from tests.unit.proxy.builders import AppliedRouter, load, registration, snapshot


def make_router(
    prefill: PolicyName = "round_robin",
    decode: PolicyName = "round_robin",
    *,
    slots: Slots | None = None,
    split_min_tokens: int = 0,
) -> AppliedRouter:
    loads = Loads(slots or Slots(), {"prefill": None, "decode": None})
    return AppliedRouter(prefill, decode, loads, split_min_tokens)


def asked(model: str = "m", **fields: Any) -> RoutingRequest:
    return RoutingRequest(model=model, **fields)


def fleet(prefills: int, decodes: int, boths: int = 0) -> Snapshot:
    return snapshot(
        *(registration("prefill", 100 + index) for index in range(prefills)),
        *(registration("decode", 200 + index) for index in range(decodes)),
        *(registration("both", 300 + index) for index in range(boths)),
    )


def ports(pair: Pair | NoPair) -> tuple[int, int]:
    assert isinstance(pair, Pair)
    return tuple(int(node.info.address.rsplit(":", 1)[1]) for node in (pair.prefill, pair.decode))  # type: ignore[return-value]


@given(prefills=st.integers(1, 6), decodes=st.integers(1, 6), warm_up=st.integers(0, 50))
def test_every_pair_is_used_evenly(prefills: int, decodes: int, warm_up: int) -> None:
    """X8: the two turns do not correlate; over P * D requests each pair is used once, from any start."""
    router, agents = make_router(), fleet(prefills, decodes)
    for _ in range(warm_up * prefills * decodes):
        router.route(agents, asked("m"))
    used = Counter(ports(router.route(agents, asked("m"))) for _ in range(prefills * decodes))
    assert len(used) == prefills * decodes
    assert set(used.values()) == {1}


@given(prefills=st.integers(1, 6), decodes=st.integers(1, 6), requests=st.integers(1, 60))
def test_each_role_takes_turns(prefills: int, decodes: int, requests: int) -> None:
    router, agents = make_router(), fleet(prefills, decodes)
    pairs = [ports(router.route(agents, asked("m"))) for _ in range(requests)]
    for leg, size in ((0, prefills), (1, decodes)):
        loads = Counter(dict.fromkeys(range((100, 200)[leg], (100, 200)[leg] + size), 0))
        loads.update(pair[leg] for pair in pairs)
        slack = 1 if leg == 0 else 2  # decode's turn moves on by one extra whenever the two fall in step
        assert max(loads.values()) - min(loads.values()) <= slack


def test_the_turns_of_one_model_do_not_depend_on_anothers_requests() -> None:
    agents = snapshot(
        *(registration("prefill", 100 + index, model="a") for index in range(2)),
        *(registration("decode", 200 + index, model="a") for index in range(2)),
        registration("both", 300, model="b"),
    )
    router, used = make_router(), Counter[tuple[int, int]]()
    for _ in range(4):
        used[ports(router.route(agents, asked("a")))] += 1
        router.route(agents, asked("b"))
        router.route(agents, asked("a", one_token=True))
    assert len(used) == 4


def test_a_single_agent_with_role_both_serves_alone() -> None:
    pair = make_router().route(fleet(0, 0, boths=1), asked("m"))
    assert isinstance(pair, Pair) and pair.alone and len(pair.nodes) == 1


def test_agents_with_role_both_serve_either_leg() -> None:
    router, agents = make_router(), fleet(1, 1, boths=1)
    pairs = {ports(router.route(agents, asked("m"))) for _ in range(4)}
    assert pairs == {(100, 200), (100, 300), (300, 200), (300, 300)}


def test_a_request_of_one_token_takes_prefill_agents_in_turn() -> None:
    router, agents = make_router(), fleet(2, 1)
    chosen = [ports(router.route(agents, asked("m", one_token=True))) for _ in range(4)]
    assert chosen == [(100, 100), (101, 101)] * 2


def test_agents_to_avoid_are_taken_only_if_nobody_else_is_left() -> None:
    router, agents = make_router(), fleet(2, 2)
    bad = frozenset({Incarnation(f"{100:016x}"), Incarnation(f"{201:016x}")})
    assert {ports(router.route(agents, asked("m"), bad)) for _ in range(8)} == {(101, 200)}
    assert isinstance(router.route(fleet(1, 1), asked("m"), bad), Pair)
    assert isinstance(router.route(fleet(1, 0), asked("m", one_token=True), bad), Pair)


def test_an_avoided_both_agent_is_avoided_on_both_legs() -> None:
    router, agents = make_router(), fleet(1, 1, boths=1)
    bad = frozenset({Incarnation(f"{300:016x}")})
    assert {ports(router.route(agents, asked("m"), bad)) for _ in range(6)} == {(100, 200)}


def test_apart_means_two_agents() -> None:
    router, agents = make_router(), fleet(0, 0, boths=2)
    assert {ports(router.route(agents, asked("m"), apart=True)) for _ in range(4)} == {
        (300, 301),
        (301, 300),
    }
    assert router.route(fleet(0, 0, boths=1), asked("m"), apart=True) is NoPair.INCOMPATIBLE


def test_the_reasons_are_told_apart() -> None:
    router = make_router()
    assert router.route(snapshot(), asked("m")) is NoPair.NO_AGENT
    assert router.route(fleet(1, 1), asked("other")) is NoPair.UNKNOWN_MODEL
    assert router.route(fleet(0, 1), asked("m")) is NoPair.NO_PREFILL
    assert router.route(fleet(1, 0), asked("m")) is NoPair.NO_DECODE
    apart = snapshot(registration("prefill", 1), registration("decode", 2, layout="other"))
    assert router.route(apart, asked("m")) is NoPair.INCOMPATIBLE
    assert router.route(fleet(0, 1), asked("m", one_token=True)) is NoPair.NO_PREFILL
    assert router.route(fleet(0, 1), asked("other", one_token=True)) is NoPair.UNKNOWN_MODEL
    assert no_pair(fleet(1, 1), "m") is None
    assert no_pair(fleet(1, 0), "m") is NoPair.NO_DECODE


def test_agents_out_of_rotation_are_not_chosen() -> None:
    for state in set(NodeState) - {NodeState.READY}:
        agents = snapshot(registration("both", 1), state=state)
        assert make_router().route(agents, asked("m")) is NoPair.NO_PREFILL


def test_an_agent_on_trial_is_waited_for() -> None:
    """Whether it works again is known soon. While it rests after a failure, nobody is asked to wait."""
    prefill, decode = fleet(1, 1).nodes
    for tripped, other, reason in ((prefill, decode, NoPair.NO_PREFILL), (decode, prefill, NoPair.NO_DECODE)):
        for breaker, answer in ((BreakerState.HALF_OPEN, NoPair.FULL), (BreakerState.OPEN, reason)):
            node = replace(tripped, state=NodeState.TRIPPED, breaker=breaker)
            agents = Snapshot.of((node, other), frozenset({"m"}))
            assert make_router().route(agents, asked()) is answer
            assert make_router().route(agents, asked(), frozenset({other.incarnation})) is answer
    tried = replace(decode, state=NodeState.TRIPPED, breaker=BreakerState.HALF_OPEN)
    alone = Snapshot.of((tried,), frozenset({"m"}))
    assert make_router().route(alone, asked()) is NoPair.NO_PREFILL, "its passing would not help"


def test_only_pairs_that_fit_are_chosen_and_they_evenly() -> None:
    """Two kinds of prefill agent with their own decode agents: nobody's turn is lost to the other kind."""
    agents = snapshot(
        registration("prefill", 100, layout="x"),
        registration("prefill", 101, layout="y"),
        registration("prefill", 102, layout="z"),
        *(registration("decode", 200 + index, layout="x") for index in range(2)),
        *(registration("decode", 210 + index, layout="y") for index in range(2)),
    )
    router = make_router()
    chosen = [router.route(agents, asked("m")) for _ in range(8)]
    assert all(
        isinstance(pair, Pair) and mismatch(pair.prefill.info, pair.decode.info) is None for pair in chosen
    )
    assert Counter(ports(pair) for pair in chosen) == {
        (100, 200): 2, (100, 201): 2, (101, 210): 2, (101, 211): 2,
    }  # fmt: skip


def test_unknown_models_take_no_room() -> None:
    router = make_router()
    for index in range(1000):
        router.route(fleet(1, 1), asked(f"invented-{index}"))
    assert not router.turns._pairs and not router.turns._lone


def full(slots: Slots, agents: Snapshot, *ports: int) -> None:
    """Every agent at these ports has all that it runs at once."""
    for node in agents.nodes:
        if int(node.info.address.rsplit(":", 1)[1]) in ports:
            slots.acquire(node.incarnation, node.info.load.max_running or 0)


def limited_fleet(prefills: int, decodes: int, max_running: int = 2) -> Snapshot:
    each = load(max_running=max_running)
    return snapshot(
        *(registration("prefill", 100 + index, load=each) for index in range(prefills)),
        *(registration("decode", 200 + index, load=each) for index in range(decodes)),
    )


def test_agents_without_room_are_left_out_and_without_any_it_is_said_so() -> None:
    slots, agents = Slots(), limited_fleet(2, 2)
    router = make_router(slots=slots)
    full(slots, agents, 100, 201)
    assert {ports(router.route(agents, asked())) for _ in range(4)} == {(101, 200)}
    full(slots, agents, 200)
    assert router.route(agents, asked()) is NoPair.FULL
    assert ports(router.route(agents, asked(one_token=True))) == (101, 101)
    full(slots, agents, 101)
    assert router.route(agents, asked(one_token=True)) is NoPair.FULL
    assert no_pair(agents, "m") is None, "it passes by itself"


def test_each_choice_of_a_request_needs_room_at_the_decode_agent_and_one_at_the_prefill_agent() -> None:
    slots, agents = Slots(), limited_fleet(1, 1, max_running=4)
    router = make_router(slots=slots)
    for node in agents.nodes:
        slots.acquire(node.incarnation, 1)
    assert isinstance(router.route(agents, asked(n=3)), Pair)
    assert router.route(agents, asked(n=4)) is NoPair.FULL


def test_a_retry_waits_for_another_agent_rather_than_go_back_to_the_one_that_failed() -> None:
    slots, agents = Slots(), limited_fleet(1, 2)
    full(slots, agents, 201)
    failed = frozenset({Incarnation(f"{200:016x}")})
    assert make_router(slots=slots).route(agents, asked(), failed) is NoPair.FULL


def test_each_role_has_its_own_policy() -> None:
    slots, agents = Slots(), fleet(2, 2)
    slots.acquire(Incarnation(f"{100:016x}"), 5)
    router = make_router("least_work", "session", slots=slots)
    chosen = {ports(router.route(agents, asked(session="mine"))) for _ in range(6)}
    assert len(chosen) == 1 and chosen <= {(101, 200), (101, 201)}


def test_both_agents_of_a_pair_are_remembered_for_their_prefix() -> None:
    agents, router = fleet(3, 3), make_router("prefix_aware", "prefix_aware")
    first = ports(router.route(agents, asked(prompt="x" * 1000)))
    assert [ports(router.route(agents, asked(prompt="x" * 1000 + "y"))) for _ in range(4)] == [first] * 4
    assert ports(router.route(agents, asked(prompt="z" * 1000))) != first


@pytest.mark.parametrize(("tokens", "alone"), [(9, True), (10, False)])
def test_a_short_prompt_is_served_by_one_decode_agent_alone(tokens: int, alone: bool) -> None:
    router, agents = make_router(split_min_tokens=10), fleet(2, 2)
    pairs = [router.route(agents, asked(prompt=[1] * tokens)) for _ in range(4)]
    if alone:
        assert [ports(pair) for pair in pairs] == [(200, 200), (201, 201)] * 2
    else:
        assert len({ports(pair) for pair in pairs}) == 4


@pytest.mark.parametrize("one_token", [False, True])
def test_a_stream_that_has_begun_is_not_begun_again_alone(one_token: bool) -> None:
    pair = make_router(split_min_tokens=10).route(fleet(1, 1), asked(one_token=one_token), apart=True)
    assert isinstance(pair, Pair) and not pair.alone


def test_short_prompts_among_long_ones_still_take_turns() -> None:
    router, agents, short = make_router(split_min_tokens=10), fleet(2, 2), []
    for _ in range(4):
        router.route(agents, asked(prompt=[1] * 100))
        short.append(ports(router.route(agents, asked(prompt=[1]))))
    assert Counter(short) == {(200, 200): 2, (201, 201): 2}


def test_what_is_cached_does_not_count_as_prompt() -> None:
    router, agents = make_router(decode="prefix_aware", split_min_tokens=30), fleet(1, 2)
    ids = list(range(140))
    first = ports(router.route(agents, asked(prompt=ids)))
    again = ports(router.route(agents, asked(prompt=ids)))  # 128 of 140 are in whole chunks
    assert first[0] == 100 and again == (first[1], first[1])


def test_without_a_decode_agent_a_short_prompt_waits_like_any_other() -> None:
    assert make_router(split_min_tokens=10).route(fleet(1, 0), asked()) is NoPair.NO_DECODE
    slots, agents = Slots(), limited_fleet(1, 1)
    full(slots, agents, 200)
    assert make_router(slots=slots, split_min_tokens=10).route(agents, asked()) is NoPair.FULL


def test_without_a_prefill_agent_decode_agents_serve_alone_in_turn() -> None:
    """W2. Any prompt, and what a prefill agent alone would answer otherwise."""
    router, agents = make_router(), fleet(0, 2)
    for request in (asked(prompt=[1] * 5000), asked(one_token=True), asked(n=3), asked(undivided=True)):
        pairs = [ports(router.route(agents, request, decode_only=True)) for _ in range(2)]
        assert sorted(pairs) == [(200, 200), (201, 201)]


@pytest.mark.parametrize("state", sorted(set(NodeState) - {NodeState.READY}))
def test_a_prefill_agent_out_of_rotation_is_none(state: NodeState) -> None:
    agents, router = fleet(1, 1), make_router()
    out = agents.altered(
        replace(node, state=state) if node.info.role == "prefill" else node for node in agents.nodes
    )
    assert ports(router.route(out, asked(), decode_only=True)) == (200, 200)
    assert router.route(out, asked()) is NoPair.NO_PREFILL
    assert ports(router.route(agents, asked(), decode_only=True)) == (100, 200)


def test_a_prefill_agent_that_has_just_failed_the_request_is_tried_again() -> None:
    """As long as it is in rotation: one that is down is soon not."""
    bad = frozenset({Incarnation(f"{100:016x}")})
    assert ports(make_router().route(fleet(1, 1), asked(), bad, decode_only=True)) == (100, 200)


def test_decode_agents_that_have_just_failed_the_request_come_last() -> None:
    bad = frozenset({Incarnation(f"{200:016x}")})
    assert ports(make_router().route(fleet(0, 2), asked(), bad, decode_only=True)) == (201, 201)
    assert ports(make_router().route(fleet(0, 1), asked(), bad, decode_only=True)) == (200, 200)


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_only_engines_that_can_serve_alone(dialect: str) -> None:
    agents = snapshot(registration("decode", 200, dialect=dialect))
    chosen = make_router().route(agents, asked(), decode_only=True)
    not_served = FleetSettings().not_served(agents, "m")
    if dialect == "sglang":
        assert chosen is not_served is NoPair.NO_PREFILL
    else:
        assert ports(chosen) == (200, 200) and not_served is None


def test_no_decode_agent_serves_alone_for_other_reasons() -> None:
    router = make_router()
    misfits = snapshot(registration("prefill", 1), registration("decode", 2, layout="other"))
    assert router.route(misfits, asked(), decode_only=True) is NoPair.INCOMPATIBLE
    assert router.route(fleet(1, 0), asked(), decode_only=True) is NoPair.NO_DECODE
    assert router.route(fleet(0, 1), asked(), decode_only=True, apart=True) is NoPair.NO_PREFILL
    assert router.route(fleet(0, 1), asked("other"), decode_only=True) is NoPair.UNKNOWN_MODEL


def test_decode_agents_without_room_are_waited_for() -> None:
    slots, agents = Slots(), limited_fleet(0, 1)
    full(slots, agents, 200)
    assert make_router(slots=slots).route(agents, asked(), decode_only=True) is NoPair.FULL


def streaming_pair(policy: PolicyName = "round_robin", least: int | None = 64, **decode: Any) -> Any:
    """A function that tells whether a request's KV is pulled while its prompt is computed."""
    loads = Loads(Slots(), {})
    router = AppliedRouter(policy, "round_robin", loads, 0, least)
    agents = snapshot(
        registration("prefill", 1, prefill_chunk=100), registration("decode", 2, load=load(**decode))
    )

    def streamed(tokens: int) -> bool:
        pair = router.route(agents, asked(prompt=[7] * tokens))
        assert isinstance(pair, Pair)
        return pair.streamed

    return streamed


@pytest.mark.parametrize(
    ("least", "tokens", "streamed"),
    [(64, 63, False), (64, 64, True), (None, 100, False), (None, 101, True), (0, 5000, False)],
)
def test_a_long_prompt_is_pulled_while_it_is_computed(least: int | None, tokens: int, streamed: bool) -> None:
    """Long is what takes the prefill agent more than one chunk, unless a number is given."""
    assert streaming_pair(least=least)(tokens) is streamed


def test_what_the_prefill_agent_has_seen_need_not_be_computed() -> None:
    streamed = streaming_pair("prefix_aware", least=128)
    assert [streamed(192), streamed(192), streamed(384)] == [True, False, True]


@pytest.mark.parametrize(("free", "total", "streamed"), [(50, 100, True), (49, 100, False), (0, 0, False)])
def test_nothing_is_set_aside_early_where_room_is_scarce(free: int, total: int, streamed: bool) -> None:
    assert streaming_pair(kv_blocks_free=free, kv_blocks_total=total)(64) is streamed
