# SPDX-License-Identifier: Apache-2.0
"""What agents report of their transfers, added up."""

from __future__ import annotations

from typing import Any

from kvferry.proxy.telemetry import transfer_totals
from kvferry.proxy.telemetry.transfer_totals import MAX_PAIRS, MAX_REASONS, OTHER, TransferTotals
from kvferry.proxy.wire.registration import PULL_BUCKETS, Bye, Incarnation, LinkUse, WorkReport
from tests.unit.proxy.builders import registration

PREFILL = registration("prefill", 1)


def totals() -> TransferTotals:
    made = TransferTotals(lambda: 50.0)
    made.note(PREFILL)
    return made


def report(made: TransferTotals, port: int = 2, **fields: Any) -> None:
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
    monkeypatch.setattr(transfer_totals, "MAX_AGENTS", 10)
    made = totals()
    for number in range(3 * MAX_PAIRS // 16):
        report(made, number)
        links = tuple(link(f"{number}-{each}", pulls=1) for each in range(16))
        report(made, number, links=links, failures={f"{number}-{each}": 1 for each in range(32)})
    assert made.num_pairs == MAX_PAIRS
    assert len(made.failures()) == MAX_REASONS + 1
    assert made.failures()[OTHER] > 0
    assert len(made._last) == len(made._addresses) == 10
