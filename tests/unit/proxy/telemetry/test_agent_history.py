# SPDX-License-Identifier: Apache-2.0
"""What is remembered of each agent's load: by slices, with gaps, and bounded."""

from __future__ import annotations

import pytest

from kvferry.proxy.telemetry import agent_history
from kvferry.proxy.telemetry.agent_history import AgentHistories
from kvferry.proxy.telemetry.history import HOUR_SLICE_S, NUM_HOUR_SLICES, NUM_SLICES, SLICE_S
from kvferry.proxy.wire.registration import Bye, Incarnation
from tests.unit.proxy.builders import Clock, load, registration

AGENT = Incarnation(f"{1:016x}")


@pytest.fixture
def clock() -> Clock:
    made = Clock()
    made.now = 1000 * HOUR_SLICE_S
    return made


def ping(histories: AgentHistories, running: int, port: int = 1, **fields: int) -> None:
    histories.note(registration("decode", port, load=load(running, **fields)))


def test_a_slice_shows_what_the_first_ping_in_it_said(clock: Clock) -> None:
    histories = AgentHistories(clock)
    ping(histories, 2, waiting=3, kv_blocks_free=750, kv_blocks_leased=100)
    ping(histories, 9)
    clock.now += SLICE_S
    ping(histories, 4)
    shown = histories.charts(AGENT)
    assert (shown["charts"]["slice_s"], shown["hour"]["slice_s"]) == (SLICE_S, HOUR_SLICE_S)
    last_two = {name: values[-2:] for name, values in shown["charts"].items() if name != "slice_s"}
    assert last_two == {"running": [2, 4], "waiting": [3, 0], "kv_used": [0.25, 0], "kv_leased": [0.1, 0]}
    assert shown["charts"]["running"][:-2] == [None] * (NUM_SLICES - 2)
    assert shown["hour"]["running"] == [None] * (NUM_HOUR_SLICES - 1) + [2]


@pytest.mark.parametrize("silent", [1, 5, NUM_SLICES - 1, NUM_SLICES, 3 * NUM_SLICES])
def test_slices_without_a_ping_show_nothing(clock: Clock, silent: int) -> None:
    """Nor what stood at their place in the ring before."""
    histories = AgentHistories(clock)
    for number in range(NUM_SLICES):
        ping(histories, number)
        clock.now += SLICE_S
    clock.now += (silent - 1) * SLICE_S
    kept = max(0, NUM_SLICES - silent)
    before = [float(number) for number in range(NUM_SLICES)][NUM_SLICES - kept :]
    assert histories.charts(AGENT)["charts"]["running"] == before + [None] * (NUM_SLICES - kept)
    ping(histories, 7)
    shown = histories.charts(AGENT)["charts"]["running"]
    assert shown[-1] == 7
    assert shown[:kept] == before
    assert shown[kept:-1] == [None] * (NUM_SLICES - kept - 1)


def test_an_agent_that_does_not_say_how_many_blocks_it_has(clock: Clock) -> None:
    histories = AgentHistories(clock)
    ping(histories, 1, kv_blocks_free=0, kv_blocks_total=0)
    shown = histories.charts(AGENT)["charts"]
    assert (shown["running"][-1], shown["kv_used"][-1]) == (1, None)


def test_agents_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_history, "MAX_AGENTS", 2)
    histories = AgentHistories(clock)
    for port in (1, 2, 1, 3):
        ping(histories, port, port)
    histories.note(Bye(incarnation=AGENT))
    remembered = [bool(histories.charts(Incarnation(f"{port:016x}"))) for port in (1, 2, 3)]
    assert remembered == [True, False, True], "who has not pinged for longest makes way"
