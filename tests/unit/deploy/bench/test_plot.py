# SPDX-License-Identifier: Apache-2.0
"""Charts of one level and of several, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.deploy.bench.config import Level, Objectives
from kvferry.deploy.bench.measurement import BenchResult, BenchRound, LevelResult
from tests.unit.deploy.bench.test_report import RESULT, ROUNDS, seen

plot = pytest.importorskip(
    "kvferry.deploy.bench.plot", reason="the extra bench is not installed", exc_type=ImportError
)


@pytest.mark.parametrize("objectives", [Objectives(None, None, None), Objectives(100.0, 20.0, 900.0)])
@pytest.mark.parametrize("num_levels", [1, 3])
def test_a_chart_names_servers_and_latencies(tmp_path: Path, objectives: Objectives, num_levels: int) -> None:
    nothing = [BenchRound(1.0, [seen(failure="no")])]
    levels = [
        LevelResult(Level("rate", number + 1), {"one": ROUNDS, "two": nothing if number else ROUNDS})
        for number in range(num_levels)
    ]
    path = tmp_path / "chart.svg"
    plot.write_plot(BenchResult(RESULT.models, levels), objectives, path)
    text = path.read_text()
    assert "<!-- TTFT ms -->" in text
    assert "<!-- one" in text and "<!-- two" in text
    assert ("<!-- objective -->" in text) is bool(objectives)
