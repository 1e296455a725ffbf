# SPDX-License-Identifier: Apache-2.0
"""When the transfer thread looks whether a launch has landed."""

from __future__ import annotations

import select
import time

import pytest

from kvferry.transfer.backends.common.timer import Timer
from kvferry.transfer.backends.cuda_ipc.pace import Pace

GIB = 1 << 30


def test_looks_begin_when_a_launch_can_have_landed() -> None:
    pace = Pace()
    assert pace.next_look(GIB, begun=1.0, now=1.0) < 1.0001
    pace.learn(GIB, 0.003)
    assert pace.next_look(2 * GIB, begun=5.0, now=5.0) == pytest.approx(5.006)


def test_a_launch_that_is_late_is_looked_at_ever_less_often() -> None:
    pace = Pace()
    pace.learn(GIB, 0.003)
    now, looks = 5.0, 0
    while now < 15.0:
        now, looks = pace.next_look(GIB, begun=5.0, now=now), looks + 1
    assert looks < 200
    assert now < 16.1


def test_a_launch_is_seen_to_have_landed_soon_after_however_long_it_took() -> None:
    pace = Pace()
    pace.learn(GIB, 0.003)
    landed = 5.0 + 8 * 0.00302
    now = 5.0
    while now < landed:
        now = pace.next_look(8 * GIB, begun=5.0, now=now)
    assert now - landed < 0.00004


def test_neither_a_small_launch_nor_one_beside_the_model_makes_it_look_late() -> None:
    pace = Pace()
    pace.learn(GIB, 0.003)
    for _ in range(10):
        pace.learn(4096, 0.001)
        pace.learn(GIB, 0.009)
    assert pace.next_look(GIB, begun=5.0, now=5.0) < 5.0033


def test_a_link_that_has_become_slower_is_looked_at_later_in_time() -> None:
    pace = Pace()
    pace.learn(GIB, 0.003)
    for _ in range(1000):
        pace.learn(GIB, 0.009)
    assert pace.next_look(GIB, begun=5.0, now=5.0) == pytest.approx(5.009)


def test_what_no_clock_saw_teaches_nothing() -> None:
    pace = Pace()
    pace.learn(GIB, 0.0)
    assert pace.next_look(GIB, begun=5.0, now=5.0) < 5.0001


def test_a_timer_is_silent_until_its_time_and_after_it_was_set_to_none() -> None:
    timer = Timer()
    try:
        assert not select.select([timer], [], [], 0)[0]
        timer.set(time.monotonic() + 3600)
        assert not select.select([timer], [], [], 0)[0]
        at = time.monotonic() + 0.02
        timer.set(at)
        assert select.select([timer], [], [], 10.0)[0]
        assert time.monotonic() >= at
        timer.set(None)
        assert not select.select([timer], [], [], 0)[0]
    finally:
        timer.close()
