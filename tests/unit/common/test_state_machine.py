# SPDX-License-Identifier: Apache-2.0
"""The helper of every lifecycle."""

from __future__ import annotations

import enum

import pytest

from kvferry.common.state_machine import IllegalTransition, transition, transitions


class Door(enum.Enum):
    OPEN = "open"
    SHUT = "shut"
    GONE = "gone"


DOOR_TRANSITIONS = transitions({Door.OPEN: {Door.SHUT}, Door.SHUT: {Door.OPEN, Door.GONE}})


def test_an_edge_of_the_table_gives_the_next_state() -> None:
    assert transition("front", DOOR_TRANSITIONS, Door.OPEN, Door.SHUT) is Door.SHUT


@pytest.mark.parametrize(("origin", "to"), [(Door.OPEN, Door.GONE), (Door.GONE, Door.OPEN)])
def test_any_other_raises_and_names_subject_and_states(origin: Door, to: Door) -> None:
    with pytest.raises(IllegalTransition) as raised:
        transition("front", DOOR_TRANSITIONS, origin, to)
    assert (raised.value.subject, raised.value.origin, raised.value.to) == ("front", origin, to)
    assert str(raised.value) == f"front: {origin.value} → {to.value}"


def test_states_that_are_only_targets_are_terminal() -> None:
    assert DOOR_TRANSITIONS[Door.GONE] == frozenset()


def test_a_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        DOOR_TRANSITIONS[Door.GONE] = frozenset({Door.OPEN})  # type: ignore[index]


def test_states_may_be_plain_strings() -> None:
    table = transitions({"starting": ("ready",)})
    assert transition("agent", table, "starting", "ready") == "ready"
    with pytest.raises(IllegalTransition, match="agent: ready → starting"):
        transition("agent", table, "ready", "starting")
