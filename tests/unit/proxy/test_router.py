# SPDX-License-Identifier: Apache-2.0
"""Which pair takes the next request."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.pairing import mismatch
from proxy.policy import NoPair, Pair, RoundRobin, can_serve
from proxy.registry import NodeState, Snapshot
from proxy.wire import Incarnation
from tests.unit.proxy.builders import registration, snapshot


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
    policy, agents = RoundRobin(), fleet(prefills, decodes)
    for _ in range(warm_up * prefills * decodes):
        policy.choose(agents, "m")
    used = Counter(ports(policy.choose(agents, "m")) for _ in range(prefills * decodes))
    assert len(used) == prefills * decodes
    assert set(used.values()) == {1}


@given(prefills=st.integers(1, 6), decodes=st.integers(1, 6), requests=st.integers(1, 60))
def test_each_role_takes_turns(prefills: int, decodes: int, requests: int) -> None:
    policy, agents = RoundRobin(), fleet(prefills, decodes)
    pairs = [ports(policy.choose(agents, "m")) for _ in range(requests)]
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
    policy, used = RoundRobin(), Counter[tuple[int, int]]()
    for _ in range(4):
        used[ports(policy.choose(agents, "a"))] += 1
        policy.choose(agents, "b")
        policy.choose_alone(agents, "a")
    assert len(used) == 4


def test_a_single_agent_with_role_both_serves_alone() -> None:
    pair = RoundRobin().choose(fleet(0, 0, boths=1), "m")
    assert isinstance(pair, Pair) and pair.alone and len(pair.nodes) == 1


def test_agents_with_role_both_serve_either_leg() -> None:
    policy, agents = RoundRobin(), fleet(1, 1, boths=1)
    pairs = {ports(policy.choose(agents, "m")) for _ in range(4)}
    assert pairs == {(100, 200), (100, 300), (300, 200), (300, 300)}


def test_a_request_of_one_token_takes_prefill_agents_in_turn() -> None:
    policy, agents = RoundRobin(), fleet(2, 1)
    chosen = [ports(policy.choose_alone(agents, "m")) for _ in range(4)]
    assert chosen == [(100, 100), (101, 101)] * 2


def test_agents_to_avoid_are_taken_only_if_nobody_else_is_left() -> None:
    policy, agents = RoundRobin(), fleet(2, 2)
    bad = frozenset({Incarnation(f"{100:016x}"), Incarnation(f"{201:016x}")})
    assert {ports(policy.choose(agents, "m", bad)) for _ in range(8)} == {(101, 200)}
    assert isinstance(policy.choose(fleet(1, 1), "m", bad), Pair)
    assert isinstance(policy.choose_alone(fleet(1, 0), "m", bad), Pair)


def test_an_avoided_both_agent_is_avoided_on_both_legs() -> None:
    policy, agents = RoundRobin(), fleet(1, 1, boths=1)
    bad = frozenset({Incarnation(f"{300:016x}")})
    assert {ports(policy.choose(agents, "m", bad)) for _ in range(6)} == {(100, 200)}


def test_apart_means_two_agents() -> None:
    policy, agents = RoundRobin(), fleet(0, 0, boths=2)
    assert {ports(policy.choose(agents, "m", apart=True)) for _ in range(4)} == {(300, 301), (301, 300)}
    assert policy.choose(fleet(0, 0, boths=1), "m", apart=True) is NoPair.INCOMPATIBLE


def test_the_reasons_are_told_apart() -> None:
    policy = RoundRobin()
    assert policy.choose(snapshot(), "m") is NoPair.NO_AGENT
    assert policy.choose(fleet(1, 1), "other") is NoPair.UNKNOWN_MODEL
    assert policy.choose(fleet(0, 1), "m") is NoPair.NO_PREFILL
    assert policy.choose(fleet(1, 0), "m") is NoPair.NO_DECODE
    apart = snapshot(registration("prefill", 1), registration("decode", 2, layout="other"))
    assert policy.choose(apart, "m") is NoPair.INCOMPATIBLE
    assert policy.choose_alone(fleet(0, 1), "m") is NoPair.NO_PREFILL
    assert policy.choose_alone(fleet(0, 1), "other") is NoPair.UNKNOWN_MODEL
    assert can_serve(fleet(1, 1), "m") is None
    assert can_serve(fleet(1, 0), "m") is NoPair.NO_DECODE


def test_agents_out_of_rotation_are_not_chosen() -> None:
    for state in set(NodeState) - {NodeState.READY}:
        agents = snapshot(registration("both", 1), state=state)
        assert RoundRobin().choose(agents, "m") is NoPair.NO_PREFILL


def test_only_pairs_that_fit_are_chosen_and_they_evenly() -> None:
    """Two kinds of prefill agent with their own decode agents: nobody's turn is lost to the other kind."""
    agents = snapshot(
        registration("prefill", 100, layout="x"),
        registration("prefill", 101, layout="y"),
        registration("prefill", 102, layout="z"),
        *(registration("decode", 200 + index, layout="x") for index in range(2)),
        *(registration("decode", 210 + index, layout="y") for index in range(2)),
    )
    policy = RoundRobin()
    chosen = [policy.choose(agents, "m") for _ in range(8)]
    assert all(
        isinstance(pair, Pair) and mismatch(pair.prefill.info, pair.decode.info) is None for pair in chosen
    )
    assert Counter(ports(pair) for pair in chosen) == {
        (100, 200): 2, (100, 201): 2, (101, 210): 2, (101, 211): 2,
    }  # fmt: skip


def test_unknown_models_take_no_room() -> None:
    policy = RoundRobin()
    for index in range(1000):
        policy.choose(fleet(1, 1), f"invented-{index}")
    assert len(policy._pair_counts) == 0
