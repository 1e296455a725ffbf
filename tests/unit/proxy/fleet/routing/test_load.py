# SPDX-License-Identifier: Apache-2.0
"""How busy an agent is taken to be, between two pings."""

from __future__ import annotations

import pytest

from kvferry.proxy.fleet.routing.candidates import Loads, Slots
from kvferry.proxy.fleet.snapshot import Node, NodeState
from kvferry.proxy.wire.registration import Incarnation
from tests.unit.proxy.builders import load, registration

FREE = {"prefill": None, "decode": None}

FIRST, SECOND = Incarnation("1"), Incarnation("2")


def agent(running: int = 0, *, ours_at_ping: int = 0, **fields: int | None) -> Node:
    info = registration("decode", 1, load=load(running, **fields))
    return Node(info, NodeState.READY, 0.0, ours_at_ping)


@pytest.mark.parametrize(
    ("running", "ours_at_ping", "ours_now", "expected"),
    [
        (0, 0, 3, 3),  # given since the ping
        (5, 5, 2, 2),  # ended since the ping
        (7, 5, 5, 7),  # two of another proxy
        (7, 5, 0, 2),
        (1, 5, 5, 5),  # on their way when it pinged
    ],
)
def test_what_this_proxy_had_is_replaced_by_what_it_has(
    running: int, ours_at_ping: int, ours_now: int, expected: int
) -> None:
    slots, node = Slots(), agent(running, ours_at_ping=ours_at_ping)
    slots.acquire(node.incarnation, ours_now)
    assert Loads(slots, FREE).at(node) == expected


def test_room_is_what_the_agent_reports_unless_an_operator_says_less() -> None:
    node, slots = agent(2, max_running=4), Slots()
    assert Loads(slots, FREE).has_room(node, "decode", 2)
    assert not Loads(slots, FREE).has_room(node, "decode", 3)
    limited = Loads(slots, {"prefill": None, "decode": 3})
    assert not limited.has_room(node, "decode", 2) and limited.has_room(node, "prefill", 2)


def test_an_agent_that_reports_no_limit_has_none() -> None:
    assert Loads(Slots(), FREE).has_room(agent(1000, kv_blocks_total=0), "decode", 50)


def test_an_idle_agent_takes_even_what_is_over_its_limit() -> None:
    """Else a request of more choices than the limit would wait for ever."""
    node = agent(max_running=2, kv_blocks_free=0)
    assert Loads(Slots(), FREE).has_room(node, "decode", 8)


@pytest.mark.parametrize(
    ("free", "given_since", "room"), [(20, 0, True), (9, 0, False), (35, 2, True), (25, 2, False)]
)
def test_kv_blocks_are_kept_for_what_was_given_since_the_ping(
    free: int, given_since: int, room: bool
) -> None:
    """Ten blocks a sequence, as those that run: leased ones are somebody else's."""
    node, slots = (
        agent(4, ours_at_ping=4, kv_blocks_total=free + 40 + 5, kv_blocks_free=free, kv_blocks_leased=5),
        Slots(),
    )
    slots.acquire(node.incarnation, 4 + given_since)
    assert Loads(slots, FREE).has_room(node, "decode", 1) is room


def test_slots_are_counted_per_agent_and_given_back() -> None:
    slots = Slots()
    slots.acquire(FIRST, 1)
    slots.acquire(SECOND, 4)
    slots.acquire(FIRST, 1)
    assert (slots.in_flight(FIRST), slots.in_flight(SECOND)) == (2, 4)
    slots.release(FIRST, 2)
    slots.release(SECOND, 4)
    assert slots.idle
    with pytest.raises(KeyError):
        slots.release(FIRST, 1)


def test_more_than_was_taken_cannot_be_given_back() -> None:
    slots = Slots()
    slots.acquire(FIRST, 1)
    with pytest.raises(AssertionError):
        slots.release(FIRST, 2)
