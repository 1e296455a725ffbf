# SPDX-License-Identifier: Apache-2.0
"""Whom a prefill agent may pull the beginning of a prompt from (their index: `test_policy.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.proxy.fleet.routing.candidates import Loads, Slots
from kvferry.proxy.fleet.routing.policy import LEAST_PULLED_TOKENS, PREFIX_PULL_COST
from kvferry.proxy.fleet.routing.routing_request import CHUNK_TOKENS, Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import Snapshot, Speed
from kvferry.proxy.wire.registration import Role
from tests.unit.proxy.builders import AppliedRouter, registration, snapshot

MIN_TOKENS = 2 * CHUNK_TOKENS
PAIR: tuple[tuple[Role, int], ...] = (("prefill", 100), ("decode", 200))
TURN = list(range(1000, 1000 + 3 * CHUNK_TOKENS))


def make_router(min_tokens: int | None = MIN_TOKENS) -> AppliedRouter:
    loads = Loads(Slots(), {"prefill": None, "decode": None})
    return AppliedRouter("round_robin", "round_robin", loads, prefix_pull_min_tokens=min_tokens)


def fleet(decodes: int = 2) -> Snapshot:
    return snapshot(
        registration("prefill", 100),
        *(registration("decode", 200 + index) for index in range(decodes)),
    )


def choose(router: AppliedRouter, agents: Snapshot, ids: list[int] = TURN, **fields: Any) -> Pair:
    pair = router.route(agents, RoutingRequest(model="m", prompt=ids, **fields))
    assert isinstance(pair, Pair)
    return pair


def lender(pair: Pair) -> str | None:
    return None if pair.prefix_lender is None else pair.prefix_lender.agent.incarnation


def test_the_agent_that_decoded_the_turn_before_is_named() -> None:
    """Whoever decodes the next one."""
    router, agents = make_router(), fleet()
    first = choose(router, agents)
    assert lender(first) is None
    second = choose(router, agents, [*TURN, *TURN])
    assert second.decode.incarnation != first.decode.incarnation
    assert lender(second) == first.decode.incarnation
    assert second.prefix_lender is not None and second.prefix_lender.min_tokens == MIN_TOKENS


@pytest.mark.parametrize("keeps_turns", [True, False])
def test_servers_of_vllm_are_named_where_they_keep_turns(keeps_turns: bool) -> None:
    loads = Loads(Slots(), {"prefill": None, "decode": None})
    router = AppliedRouter(
        "round_robin", "round_robin", loads, prefix_pull_min_tokens=MIN_TOKENS, keeps_turns=keeps_turns
    )
    agents = snapshot(*(registration(role, port, dialect="vllm-kvferry") for role, port in PAIR))
    first = choose(router, agents)
    assert lender(choose(router, agents, [*TURN, *TURN])) == (
        first.decode.incarnation if keeps_turns else None
    )


def test_nobody_is_named_for_a_turn_that_is_not_kept() -> None:
    router, agents = make_router(), fleet()
    choose(router, agents, is_kept=False)
    assert lender(choose(router, agents, [*TURN, *TURN])) is None


def test_the_longest_beginning_counts() -> None:
    router, agents = make_router(), fleet()
    choose(router, agents)
    second = choose(router, agents, [*TURN, *TURN])
    assert lender(choose(router, agents, [*TURN, *TURN, 1])) == second.decode.incarnation


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"cache_salt": b'"mine"'}),
        ({"cache_salt": b'"mine"'}, {}),
        ({}, {"ids": [7, *TURN]}),
        ({}, {"prompts": 2}),
        ({"prompts": 2}, {}),
    ],
)
def test_another_conversation_has_no_lender(before: dict[str, Any], after: dict[str, Any]) -> None:
    router, agents = make_router(), fleet()
    choose(router, agents, **before)
    assert lender(choose(router, agents, **after)) is None


def test_a_beginning_that_is_too_short_is_not_worth_it() -> None:
    router, agents = make_router(), fleet()
    choose(router, agents, [*TURN[:CHUNK_TOKENS], *range(2 * CHUNK_TOKENS)])
    assert lender(choose(router, agents)) is None
    for _ in range(2):
        assert lender(choose(router, agents, TURN[: MIN_TOKENS - 1])) is None


@pytest.mark.parametrize(
    ("speed", "least"),
    [
        (Speed(), LEAST_PULLED_TOKENS),
        (Speed(token_s=1e-3, pull_s=1e-3), LEAST_PULLED_TOKENS),
        (Speed(token_s=1e-5, pull_s=0.01), 1000 * PREFIX_PULL_COST),
        # Of most prompts most was in the prefix cache.
        (Speed(token_s=1e-6, pull_s=0.01, prompt_token_s=1e-5), 1000 * PREFIX_PULL_COST),
        (Speed(token_s=1e-5), LEAST_PULLED_TOKENS),
    ],
)
def test_what_takes_longer_to_pull_than_to_compute_is_computed(speed: Speed, least: int) -> None:
    """Two prefill agents serve in turn; the second lacks what the first has computed."""
    ids = list(range(50 * CHUNK_TOKENS))
    agents = snapshot(registration("prefill", 100), registration("prefill", 101), registration("decode", 200))
    agents = agents.altered(replace(node, speed=speed) for node in agents.nodes)
    router = make_router(None)
    choose(router, agents, ids)
    named = choose(router, agents, ids).prefix_lender
    assert named is not None and named.min_tokens == least
    unknown = speed.token_s is None
    for answer_tokens, worth in ((0.0, unknown), (least - 1.0, unknown), (least, True)):
        answered = speed._replace(answer_tokens=answer_tokens)
        told = agents.altered(replace(node, speed=answered) for node in agents.nodes)
        assert (lender(choose(router, told, ids)) is not None) == worth
    router, shorter = make_router(None), ids[: int(least) - 1]
    choose(router, agents, shorter)
    assert lender(choose(router, agents, shorter)) is None


def test_with_0_none_is_ever_named() -> None:
    router, agents = make_router(0), fleet()
    assert [lender(choose(router, agents)) for _ in range(4)] == [None] * 4


def test_an_agent_that_is_gone_or_fits_no_more_is_not_named() -> None:
    router = make_router()
    first = choose(router, fleet(1))
    assert lender(choose(router, fleet(1))) == first.decode.incarnation
    others = snapshot(registration("prefill", 100), registration("decode", 300))
    assert lender(choose(router, others)) is None
    router = make_router()
    choose(router, fleet(1))
    other = snapshot(
        registration("prefill", 100),
        registration("decode", 200, weights="others"),
        registration("decode", 300),
    )
    assert lender(choose(router, other)) is None


def test_an_agent_that_refused_the_prefill_agent_is_not_named() -> None:
    router = make_router()
    first = choose(router, fleet(1))
    refused = {first.decode.incarnation: "verify_kv"}
    agents = snapshot(registration("prefill", 100, refusals=refused), registration("decode", 200))
    pair = router.route(agents, RoutingRequest(model="m", prompt=TURN))
    assert not isinstance(pair, Pair) or lender(pair) is None
