# SPDX-License-Identifier: Apache-2.0
"""What is kept of agents' pings: each one's load, by slices, and their transfers, added up; bounded."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.proxy.telemetry import agent_reports
from kvferry.proxy.telemetry.agent_reports import MAX_PAIRS, MAX_REASONS, OTHER, AgentReports
from kvferry.proxy.telemetry.history import HOUR_SLICE_S, NUM_HOUR_SLICES, NUM_SLICES, SLICE_S
from kvferry.proxy.wire.registration import PULL_BUCKETS, Bye, Incarnation, LinkUse, WorkReport
from tests.unit.proxy.builders import Clock, load, registration

AGENT = Incarnation(f"{1:016x}")
PREFILL = registration("prefill", 1)


@pytest.fixture
def clock() -> Clock:
    made = Clock()
    made.now = 1000 * HOUR_SLICE_S
    return made


def ping(reports: AgentReports, running: int, port: int = 1, **fields: int) -> None:
    reports.note(registration("decode", port, load=load(running, **fields)))


def test_a_slice_shows_what_the_first_ping_in_it_said(clock: Clock) -> None:
    reports = AgentReports(clock)
    ping(reports, 2, waiting=3, kv_blocks_free=750, kv_blocks_leased=100)
    ping(reports, 9)
    clock.now += SLICE_S
    ping(reports, 4)
    shown = reports.charts(AGENT)
    assert (shown["charts"]["slice_s"], shown["hour"]["slice_s"]) == (SLICE_S, HOUR_SLICE_S)
    last_two = {name: values[-2:] for name, values in shown["charts"].items() if name != "slice_s"}
    assert last_two == {"running": [2, 4], "waiting": [3, 0], "kv_used": [0.25, 0], "kv_leased": [0.1, 0]}
    assert shown["charts"]["running"][:-2] == [None] * (NUM_SLICES - 2)
    assert shown["hour"]["running"] == [None] * (NUM_HOUR_SLICES - 1) + [2]


@pytest.mark.parametrize("silent", [1, 5, NUM_SLICES - 1, NUM_SLICES, 3 * NUM_SLICES])
def test_slices_without_a_ping_show_nothing(clock: Clock, silent: int) -> None:
    """Nor what stood at their place in the ring before."""
    reports = AgentReports(clock)
    for number in range(NUM_SLICES):
        ping(reports, number)
        clock.now += SLICE_S
    clock.now += (silent - 1) * SLICE_S
    kept = max(0, NUM_SLICES - silent)
    before = [float(number) for number in range(NUM_SLICES)][NUM_SLICES - kept :]
    assert reports.charts(AGENT)["charts"]["running"] == before + [None] * (NUM_SLICES - kept)
    ping(reports, 7)
    shown = reports.charts(AGENT)["charts"]["running"]
    assert shown[-1] == 7
    assert shown[:kept] == before
    assert shown[kept:-1] == [None] * (NUM_SLICES - kept - 1)


def test_an_agent_that_does_not_say_how_many_blocks_it_has(clock: Clock) -> None:
    reports = AgentReports(clock)
    ping(reports, 1, kv_blocks_free=0, kv_blocks_total=0)
    shown = reports.charts(AGENT)["charts"]
    assert (shown["running"][-1], shown["kv_used"][-1]) == (1, None)


def test_the_agents_with_an_hour_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_reports, "MAX_AGENTS", 2)
    reports = AgentReports(clock)
    for port in (1, 2, 1, 3):
        ping(reports, port, port)
    reports.note(Bye(incarnation=AGENT))
    remembered = [bool(reports.charts(Incarnation(f"{port:016x}"))) for port in (1, 2, 3)]
    assert remembered == [True, False, True], "who has not pinged for longest makes way"


def totals() -> AgentReports:
    made = AgentReports(lambda: 50.0)
    made.note(PREFILL)
    return made


def report(made: AgentReports, port: int = 2, **fields: Any) -> None:
    """Have the decode agent at a port report this work."""
    made.note(registration("decode", port, work=WorkReport(**fields)))


def link(producer: str = PREFILL.incarnation, **fields: Any) -> LinkUse:
    return LinkUse(producer=Incarnation(producer), **fields)


def test_only_what_is_done_while_the_proxy_listens_counts() -> None:
    """A proxy that has just started shows no burst of all that agents have ever done."""
    made = totals()
    report(
        made, pull_bytes=1000, pulls=(5, 1), recomputes=3, failures={"deadline": 2}, links=(link(pulls=6),)
    )
    assert (made.totals().pull_bytes, made.num_pairs, made.failures()) == (0, 0, {})
    report(made, pull_bytes=1500, pulls=(7, 1, 1), recomputes=4, failures={"deadline": 2, "invalid": 1})
    assert made.totals().pull_bytes == 500
    assert made.totals().pulls == [2, 0, 1] + [0] * (len(PULL_BUCKETS) - 2)
    assert (made.totals().recomputes, made.totals().pull_failures) == (1, 1)
    assert {reason: count for reason, count in made.failures().items() if count} == {"invalid": 1}


def test_the_first_report_of_an_agent_that_was_seen_starting_counts_whole() -> None:
    made = totals()
    made.note(registration("decode", 2, state="starting"))
    report(made, pull_bytes=700)
    assert made.totals().pull_bytes == 700


def test_a_restart_neither_adds_nor_subtracts() -> None:
    made = totals()
    report(made, pull_bytes=100)
    report(made, pull_bytes=300)
    report(made, pull_bytes=50)
    assert made.totals().pull_bytes == 200, "a number that falls adds nothing"
    made.note(Bye(incarnation=PREFILL.incarnation))
    made.note(registration("decode", 2, incarnation="another", work=WorkReport(pull_bytes=10)))
    assert made.totals().pull_bytes == 200


def test_pairs_are_named_by_address_and_the_last_used_comes_first() -> None:
    made = totals()
    for port in (2, 3):
        report(made, port)
    report(made, 2, links=(link(pulls=1, nbytes=5, backend="tcp"), link("unheard-of", pulls=1)))
    report(made, 3, links=(link(pulls=1),))
    report(made, 2, links=(link(pulls=2, nbytes=9, backend="tcp"), link("unheard-of", pulls=1)))
    assert made.num_pairs == 3
    pairs = [(pair.producer, pair.consumer, pair.use.pulls, pair.at) for pair in made.pairs(2)]
    assert pairs == [
        (PREFILL.address, "http://10.0.0.1:2", 2, 50.0),
        (PREFILL.address, "http://10.0.0.1:3", 1, 50.0),
    ]


def test_memory_is_bounded_whatever_agents_report(monkeypatch: Any) -> None:
    monkeypatch.setattr(agent_reports, "MAX_AGENTS", 10)
    made = totals()
    for number in range(3 * MAX_PAIRS // 16):
        report(made, number)
        links = tuple(link(f"{number}-{each}", pulls=1) for each in range(16))
        report(made, number, links=links, failures={f"{number}-{each}": 1 for each in range(32)})
    assert made.num_pairs == MAX_PAIRS
    assert len(made.failures()) == MAX_REASONS + 1
    assert made.failures()[OTHER] > 0
    assert len(made._agents) == 10
