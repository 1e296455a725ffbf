# SPDX-License-Identifier: Apache-2.0
"""The proxy's own count of what is in flight."""

from __future__ import annotations

import pytest

from proxy.policy import Pair
from proxy.slots import Slots
from tests.unit.proxy.builders import registration, snapshot


def test_slots_are_counted_per_agent_and_given_back() -> None:
    first, second = snapshot(registration("both", 1), registration("decode", 2)).nodes
    apart, alone, slots = Pair(first, second), Pair(first, first), Slots()
    slots.take(apart)
    slots.take(alone)
    assert (slots.in_flight(first.incarnation), slots.in_flight(second.incarnation)) == (2, 1)
    slots.give_back(apart)
    slots.give_back(alone)
    assert slots.idle
    with pytest.raises(KeyError):
        slots.give_back(alone)
