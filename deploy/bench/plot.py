# SPDX-License-Identifier: Apache-2.0
"""Charts of what was measured, by matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvferry.deploy.bench.config import Objectives
from kvferry.deploy.bench.measurement import BenchResult
from kvferry.deploy.bench.report import LATENCIES, Summary, answered, latencies_s, summaries

PANEL_INCHES = (4.2, 3.2)
AXES = {"rate": "requests/s", "concurrency": "requests in flight", "speed": "speed of the trace"}
BOUNDS = ("ttft_ms", "tpot_ms", "e2e_ms")


def write_plot(result: BenchResult, objectives: Objectives, path: Path) -> None:
    """Write a chart: latencies and rates by level, or with one level the distribution of each latency.

    Raises OSError.
    """
    figure = Figure(layout="constrained")
    if len(result.levels) > 1:
        _plot_levels(figure, result, objectives)
    else:
        _plot_distributions(figure, result, objectives)
    figure.savefig(path, dpi=150)


def _plot_levels(figure: Figure, result: BenchResult, objectives: Objectives) -> None:
    panels = _panels(figure, 2, 3)
    kind = result.levels[0].level.kind
    found = [summaries(level, objectives) for level in result.levels]
    loads = [level.level.value for level in result.levels]
    for number, name in enumerate(result.models):
        points = [each[name] for each in found]
        for panel, latency in zip(panels, LATENCIES, strict=False):
            panel.plot(loads, _values(points, latency, "p50"), f"C{number}o-", label=f"{name} p50")
            panel.plot(loads, _values(points, latency, "p99"), f"C{number}^--", label=f"{name} p99")
        panels[4].plot(loads, [each.output_tokens_per_s for each in points], f"C{number}o-", label=name)
        kept = [each.completed_per_s if each.goodput_per_s is None else each.goodput_per_s for each in points]
        panels[5].plot(loads, kept, f"C{number}o-", label=name)
    titles = (*LATENCIES.values(), "answer tokens/s", "goodput/s" if objectives else "answered requests/s")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title)
        panel.set_xlabel(AXES[kind])
        panel.set_ylim(bottom=0)
    _mark_objectives(panels, objectives, across=True)
    _add_legends(panels)


def _plot_distributions(figure: Figure, result: BenchResult, objectives: Objectives) -> None:
    panels = _panels(figure, 2, 2)
    (level,) = result.levels
    figure.suptitle(str(level.level))
    for name, rounds in level.rounds.items():
        for panel, seconds in zip(panels, latencies_s(answered(rounds)).values(), strict=True):
            if seconds:
                panel.ecdf([1e3 * value for value in seconds], label=name)
    for panel, title in zip(panels, LATENCIES.values(), strict=True):
        panel.set_title(title)
        panel.set_ylabel("share at most this")
        panel.set_xlim(left=0)
    _mark_objectives(panels, objectives, across=False)
    _add_legends(panels)


def _panels(figure: Figure, rows: int, columns: int) -> list[Axes]:
    figure.set_size_inches(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows)
    panels = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for panel in panels:
        panel.grid(alpha=0.3)
    return panels


def _mark_objectives(panels: Sequence[Axes], objectives: Objectives, *, across: bool) -> None:
    """Add a line where an objective lies: across the panel if latencies are its heights."""
    for panel, latency in zip(panels, LATENCIES, strict=False):
        most = getattr(objectives, latency) if latency in BOUNDS else None
        if most is not None:
            (panel.axhline if across else panel.axvline)(most, color="grey", linestyle=":", label="objective")


def _add_legends(panels: Sequence[Axes]) -> None:
    for panel in panels:
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize="small")


def _values(points: Sequence[Summary], latency: str, name: str) -> list[float]:
    found = [point.latency(latency) for point in points]
    return [float("nan") if each is None else getattr(each, name) for each in found]
