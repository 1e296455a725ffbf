# SPDX-License-Identifier: Apache-2.0
"""The proxy's own count of what is in flight."""

from __future__ import annotations

import pytest

from kvferry.proxy.fleet.slots import Slots
from kvferry.proxy.wire.messages import Incarnation

FIRST, SECOND = Incarnation("1"), Incarnation("2")


def test_slots_are_counted_per_agent_and_given_back() -> None:
    slots = Slots()
    slots.take(FIRST, 1)
    slots.take(SECOND, 4)
    slots.take(FIRST, 1)
    assert (slots.in_flight(FIRST), slots.in_flight(SECOND)) == (2, 4)
    slots.release(FIRST, 2)
    slots.release(SECOND, 4)
    assert slots.idle
    with pytest.raises(KeyError):
        slots.release(FIRST, 1)


def test_more_than_was_taken_cannot_be_given_back() -> None:
    slots = Slots()
    slots.take(FIRST, 1)
    with pytest.raises(AssertionError):
        slots.release(FIRST, 2)
