# SPDX-License-Identifier: Apache-2.0
"""Figures of requests whose times are known."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.deploy.bench.client import Observation
from kvferry.deploy.bench.command import answered_everywhere
from kvferry.deploy.bench.config import BenchConfig, Level, Objectives
from kvferry.deploy.bench.measurement import BenchResult, BenchRound, LevelResult
from kvferry.deploy.bench.report import as_json, quantiles, summarize, tables

LEVEL = Level("concurrency", 2)


def seen(*events_s: float, end_s: float = 1.0, failure: str = "") -> Observation:
    return Observation(
        due_s=0.0, sent_s=0.0, events_s=list(events_s), end_s=end_s, failure=failure,
        prompt_tokens=10, output_tokens=len(events_s),
    )  # fmt: skip


ROUNDS = [
    BenchRound(
        2.0, [seen(0.1, 0.2, 0.4), seen(0.3, 0.4, end_s=0.5), seen(end_s=9.0, failure="HTTP 429: full")]
    ),
    BenchRound(2.0, [seen(0.2, end_s=0.2)]),
]  # fmt: skip
RESULT = BenchResult({"one": "m", "two": "m"}, [LevelResult(LEVEL, {"one": ROUNDS, "two": ROUNDS})])


def test_figures_are_those_of_the_requests() -> None:
    found = summarize(ROUNDS, LEVEL, Objectives(None, None, None))
    assert (found.requests, found.failed, found.failures) == (4, 1, {"HTTP 429: full": 1})
    assert (found.seconds, found.completed_per_s, found.output_tokens_per_s) == (4.0, 3 / 4, 6 / 4)
    assert (found.prompt_tokens_mean, found.output_tokens_mean) == (10, 2)
    assert (found.goodput_per_s, found.kept_share, found.sent_late_p99_ms) == (None, None, None)
    assert found.ttft_ms is not None and found.tpot_ms is not None
    assert found.itl_ms is not None and found.e2e_ms is not None
    assert (found.ttft_ms.p50, found.ttft_ms.mean) == pytest.approx((200, 200))
    assert (found.tpot_ms.p50, found.tpot_ms.max) == pytest.approx((125, 150))
    assert (found.itl_ms.p50, found.itl_ms.max) == pytest.approx((100, 200))
    assert (found.e2e_ms.p50, found.e2e_ms.max) == pytest.approx((500, 1000))


@pytest.mark.parametrize(
    ("objectives", "kept"),
    [
        (Objectives(200.0, None, None), 2),
        (Objectives(None, 120.0, None), 2),
        (Objectives(None, None, 600.0), 2),
        (Objectives(200.0, 120.0, None), 1),
        (Objectives(1.0, None, None), 0),
        (Objectives(1e6, 1e6, 1e6), 3),
    ],
)
def test_goodput_counts_what_keeps_all_objectives(objectives: Objectives, kept: int) -> None:
    """A request that failed keeps none, and counts among those sent."""
    found = summarize(ROUNDS, LEVEL, objectives)
    assert (found.goodput_per_s, found.kept_share) == (kept / 4.0, kept / 4)


def test_nothing_answered() -> None:
    rounds = [BenchRound(1.0, [seen(failure="no")])]
    found = summarize(rounds, LEVEL, Objectives(1.0, None, None))
    assert (found.ttft_ms, found.goodput_per_s, found.prompt_tokens_mean) == (None, 0.0, None)
    assert not answered_everywhere(BenchResult({"one": "m"}, [LevelResult(LEVEL, {"one": rounds})]))
    assert answered_everywhere(RESULT)
    result = BenchResult({"one": "m", "two": "m"}, [LevelResult(LEVEL, {"one": rounds, "two": ROUNDS})])
    assert "-" in shown(BenchConfig(requests=1, rounds=1), result)


def test_quantiles_lie_between_values() -> None:
    found = quantiles(number / 1e3 for number in range(101))
    assert found is not None
    assert (found.mean, found.p50, found.p90, found.p99, found.max) == pytest.approx((50, 50, 90, 99, 100))
    assert quantiles([]) is None


def shown(config: BenchConfig, result: BenchResult) -> str:
    text = io.StringIO()
    Console(width=160, file=text).print(tables(config, result), highlight=False, markup=False)
    return text.getvalue()


def test_the_tables_say_what_was_found() -> None:
    config = BenchConfig(requests=4, rounds=2, ttft_ms=200.0)
    lines = [" ".join(line.split()) for line in shown(config, RESULT).splitlines()]
    assert "2 in flight, 4 requests in 2 rounds" in lines
    assert "one 3 1 0.75 1.5 0.5 50.0 % 10 2" in lines
    assert "TTFT ms one 200 200 280 298 300 200 to 200 1.00 1.00" in lines
    assert "one: 1 failed: HTTP 429: full" in lines


def test_events_that_come_together_are_named_where_their_latency_is_shown() -> None:
    rounds = [BenchRound(1.0, [seen(0.1, 0.2, 0.2, 0.2, 0.3)])]
    result = BenchResult({"one": "m"}, [LevelResult(LEVEL, {"one": rounds})])
    text = shown(BenchConfig(requests=1), result)
    assert "2 in flight, 1 request in 1 round\n" in text
    assert "one: 50 % of the events came together with the one before, which ITL counts as 0 ms" in text
    assert "came together" not in shown(BenchConfig(), RESULT)


def test_a_generator_that_is_late_says_so() -> None:
    late = Observation(due_s=1.0, sent_s=1.2, events_s=[0.1], end_s=0.1)
    level = Level("rate", 5)
    result = BenchResult({"one": "m"}, [LevelResult(level, {"one": [BenchRound(1.0, [late])]})])
    assert "200 ms late (p99)" in shown(BenchConfig(requests=1, rounds=1), result)


def test_the_file_has_everything() -> None:
    config = BenchConfig(requests=4, rounds=2, json=Path("r.json"))
    document = json.loads(as_json(config, RESULT, "1.2"))
    assert (document["kvferry"], document["config"]["json"], document["models"]["two"]) == (
        "1.2",
        "r.json",
        "m",
    )
    [level] = document["levels"]
    assert level["level"] == {"kind": "concurrency", "value": 2}
    first = level["servers"]["one"]["rounds"][0]
    assert first["requests"][0]["events_s"] == [0.1, 0.2, 0.4]
    assert first["summary"]["requests"] == 3
    assert level["servers"]["one"]["summary"]["requests"] == 4
