# SPDX-License-Identifier: Apache-2.0
"""Transitions: those of the table, and no others."""

from __future__ import annotations

import enum

import pytest

from kvferry.proxy.http.upstream_connection import CONNECTION_TRANSITIONS, ConnectionState
from kvferry.proxy.state_machine import IllegalTransition, transition


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"


TABLE = {Light.RED: frozenset({Light.GREEN}), Light.GREEN: frozenset[Light]()}


def test_only_what_the_table_allows() -> None:
    assert transition(TABLE, Light.RED, Light.GREEN, "a light") is Light.GREEN
    with pytest.raises(IllegalTransition, match="a light: green → red"):
        transition(TABLE, Light.GREEN, Light.RED, "a light")


def test_a_closed_connection_stays_closed() -> None:
    assert not CONNECTION_TRANSITIONS[ConnectionState.CLOSED]
    assert CONNECTION_TRANSITIONS.keys() == set(ConnectionState)
