# SPDX-License-Identifier: Apache-2.0
"""Each policy, put to a fixed set of agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.fleet.pairing import Leg
from kvferry.proxy.fleet.routing.candidates import Listed
from kvferry.proxy.fleet.routing.costs import RouteCosts
from kvferry.proxy.fleet.routing.policy import (
    MAX_HOLDERS,
    OVERLOAD_FACTOR,
    OVERLOAD_SLACK,
    LeastWork,
    PrefixAware,
    PrefixIndex,
    RoundRobin,
    Session,
)
from kvferry.proxy.fleet.routing.routing_request import BYTES_PER_TOKEN, CHUNK_TOKENS, RoutingRequest
from kvferry.proxy.fleet.snapshot import Node
from kvferry.proxy.objectives import DEFAULT
from kvferry.proxy.wire.registration import Incarnation
from tests.unit.proxy.builders import registration, snapshot

ASK = RoutingRequest(model="m")
LEGS: tuple[Leg, ...] = ("prefill", "decode")
CHUNK = "x" * CHUNK_TOKENS * BYTES_PER_TOKEN


def agents(count: int) -> tuple[Node, ...]:
    return snapshot(*(registration("decode", 200 + index) for index in range(count))).nodes


def busy(nodes: Sequence[Node], *loads: int) -> Listed:
    known = {node.incarnation: load for node, load in zip(nodes, loads, strict=True)}
    return Listed(nodes, lambda node: known[node.incarnation])


def least_work(leg: Leg) -> LeastWork:
    return LeastWork(RouteCosts(lambda _: 0, {}, {}, DEFAULT), leg)


def idle(nodes: Sequence[Node]) -> Listed:
    return Listed(nodes, lambda _: 0)


def test_round_robin_goes_by_turn_whatever_the_load() -> None:
    nodes = agents(3)
    picked = [RoundRobin().pick(busy(nodes, 9, 0, 0), ASK, turn) for turn in range(6)]
    assert picked == [*nodes, *nodes]


@given(loads=st.lists(st.integers(0, 5), min_size=1, max_size=6), turn=st.integers(0, 50))
def test_while_nothing_is_measured_the_least_loaded_has_the_least_work(loads: list[int], turn: int) -> None:
    nodes = agents(len(loads))
    candidates = busy(nodes, *loads)
    for leg in LEGS:
        assert candidates.load(least_work(leg).pick(candidates, ASK, turn)) == min(loads)


def test_equally_loaded_agents_take_turns() -> None:
    nodes = agents(3)
    for leg in LEGS:
        assert [least_work(leg).pick(idle(nodes), ASK, turn) for turn in range(3)] == list(nodes)


@given(session=st.text(max_size=20), gone=st.integers(0, 4))
def test_a_session_stays_unless_its_own_agent_goes(session: str, gone: int) -> None:
    nodes, policy, ask = agents(5), Session(), RoutingRequest(model="m", session=session)
    home = policy.pick(idle(nodes), ask, 0)
    assert policy.pick(busy(nodes, 9, 9, 9, 9, 9), ask, 7) is home
    left = [node for index, node in enumerate(nodes) if index != gone]
    if home in left:
        assert policy.pick(idle(left), ask, 0) is home


def test_sessions_are_spread_and_a_request_without_one_goes_where_load_is_least() -> None:
    nodes, policy = agents(4), Session()
    homes = Counter(
        policy.pick(idle(nodes), RoutingRequest(model="m", session=f"user-{index}"), 0).info.address
        for index in range(400)
    )
    assert len(homes) == 4 and min(homes.values()) > 60
    assert policy.pick(busy(nodes, 2, 1, 0, 3), ASK, 0) is nodes[2]


def test_a_prompt_goes_where_most_of_its_beginning_was_computed() -> None:
    nodes, policy = agents(3), PrefixAware(PrefixIndex())
    policy.note(nodes[1], RoutingRequest(model="m", prompt=CHUNK + "b"))
    policy.note(nodes[2], RoutingRequest(model="m", prompt=CHUNK * 2 + "c"))
    longest = RoutingRequest(model="m", prompt=CHUNK * 3)
    assert policy.pick(idle(nodes), longest, 0) is nodes[2]
    assert policy.cached_tokens(nodes[2], longest) == 2 * CHUNK_TOKENS
    assert policy.cached_tokens(nodes[1], longest) == CHUNK_TOKENS
    assert policy.cached_tokens(nodes[0], longest) == 0
    assert policy.pick(idle(nodes[:2]), longest, 0) is nodes[1], "the next best, when the best is gone"
    assert policy.pick(idle(nodes), RoutingRequest(model="m", prompt="y" * len(CHUNK)), 1) is nodes[1], (
        "by turn"
    )


def test_a_prompt_leaves_an_overloaded_agent_for_the_least_loaded() -> None:
    nodes, policy, ask = agents(3), PrefixAware(PrefixIndex()), RoutingRequest(model="m", prompt=CHUNK)
    policy.note(nodes[0], ask)
    bearable = int(4 * OVERLOAD_FACTOR + OVERLOAD_SLACK)
    assert policy.pick(busy(nodes, bearable, 5, 4), ask, 0) is nodes[0]
    assert policy.pick(busy(nodes, bearable + 1, 5, 4), ask, 0) is nodes[2]


def test_of_several_holders_the_least_loaded_takes_it() -> None:
    nodes, policy, ask = agents(3), PrefixAware(PrefixIndex()), RoutingRequest(model="m", prompt=CHUNK)
    policy.note(nodes[0], ask)
    policy.note(nodes[1], ask)
    assert policy.pick(busy(nodes, 3, 2, 0), ask, 0) is nodes[1]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.sampled_from("ab"), min_size=1, max_size=6)), max_size=40
    ),
    capacity=st.integers(1, 12),
)
def test_the_index_stays_within_its_bound_and_never_invents_a_match(
    steps: list[tuple[int, list[str]]], capacity: int
) -> None:
    """Forgetting may only shorten a match; what was remembered last and fits is still known."""
    index = PrefixIndex(capacity)
    seen: dict[Incarnation, set[bytes]] = {}
    for agent, letters in steps:
        key = Incarnation(str(agent))
        chunks = ["".join(letters[: end + 1]).encode() for end in range(len(letters))]
        index.remember(chunks, key)
        seen.setdefault(key, set()).update(chunks)
        assert len(index) <= capacity
        assert index.matched(chunks, key) == min(len(chunks), capacity), "the beginning is forgotten last"
        for other, known in seen.items():
            assert set(chunks[: index.matched(chunks, other)]) <= known


def test_a_chunk_that_all_share_remembers_a_bounded_number_of_agents() -> None:
    index = PrefixIndex()
    for number in range(MAX_HOLDERS + 2):
        index.remember([b"c"], Incarnation(str(number)))
    known = [number for number in range(MAX_HOLDERS + 2) if index.matched([b"c"], Incarnation(str(number)))]
    assert known == list(range(2, MAX_HOLDERS + 2))
