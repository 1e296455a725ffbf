# SPDX-License-Identifier: Apache-2.0
"""When the transfer thread looks whether a launch has landed."""

from __future__ import annotations

import pytest

from kvferry.transfer.backends.cuda_ipc.launches import PollPacer

GIB = 1 << 30


def test_looks_begin_when_a_launch_can_have_landed() -> None:
    pacer = PollPacer()
    assert pacer.next_poll(GIB, begun=1.0, now=1.0) < 1.0001
    pacer.learn(GIB, 0.003)
    assert pacer.next_poll(2 * GIB, begun=5.0, now=5.0) == pytest.approx(5.006)


def test_a_launch_that_is_late_is_looked_at_ever_less_often() -> None:
    pacer = PollPacer()
    pacer.learn(GIB, 0.003)
    now, looks = 5.0, 0
    while now < 15.0:
        now, looks = pacer.next_poll(GIB, begun=5.0, now=now), looks + 1
    assert looks < 200
    assert now < 16.1


def test_a_launch_is_seen_to_have_landed_soon_after_however_long_it_took() -> None:
    pacer = PollPacer()
    pacer.learn(GIB, 0.003)
    done = 5.0 + 8 * 0.00302
    now = 5.0
    while now < done:
        now = pacer.next_poll(8 * GIB, begun=5.0, now=now)
    assert now - done < 0.00004


def test_neither_a_small_launch_nor_one_beside_the_model_makes_it_look_late() -> None:
    pacer = PollPacer()
    pacer.learn(GIB, 0.003)
    for _ in range(10):
        pacer.learn(4096, 0.001)
        pacer.learn(GIB, 0.009)
    assert pacer.next_poll(GIB, begun=5.0, now=5.0) < 5.0033


def test_a_link_that_has_become_slower_is_looked_at_later_in_time() -> None:
    pacer = PollPacer()
    pacer.learn(GIB, 0.003)
    for _ in range(1000):
        pacer.learn(GIB, 0.009)
    assert pacer.next_poll(GIB, begun=5.0, now=5.0) == pytest.approx(5.009)


def test_what_no_clock_saw_teaches_nothing() -> None:
    pacer = PollPacer()
    pacer.learn(GIB, 0.0)
    assert pacer.next_poll(GIB, begun=5.0, now=5.0) < 5.0001
