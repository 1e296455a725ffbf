# SPDX-License-Identifier: Apache-2.0
"""What a run measured: rows against their targets, and series to be drawn; as JSON, Markdown and PNG."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

_PACKAGES = ("torch", "numpy", "nixl", "triton", "pyzmq", "msgspec")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `bound` is its target: at least that with `at_least`, else at most; None: told only."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    at_least: bool = True

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return ""
        met = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "met" if met else "MISSED"

    @property
    def target(self) -> str:
        return "" if self.bound is None else f"{'≥' if self.at_least else '≤'} {self.bound:.4g}"


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common axis."""

    name: str
    x_label: str
    y_label: str
    x: list[float]
    lines: dict[str, list[float]]
    log_x: bool = False


@dataclass(slots=True)
class Report:
    """Collects what the cases found. `detail` holds whatever else is worth keeping, as every repetition."""

    machine: str
    rows: list[Row] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    detail: dict[str, object] = field(default_factory=dict)

    def add(
        self, name: str, value: float, unit: str, bound: float | None = None, *, at_least: bool = True
    ) -> None:
        """Take a figure, and print it: a run that is cut short has told what it knew."""
        row = Row(name, value, unit, bound, at_least)
        self.rows.append(row)
        print(f"{name}: {value:.4g} {unit}  {row.target} {row.verdict}", flush=True)

    def markdown(self) -> str:
        lines = ["| measured | value | target | |", "|---|---|---|---|"]
        lines += [
            f"| {row.name} | {row.value:.4g} {row.unit} | {row.target} | {row.verdict} |" for row in self.rows
        ]
        return "\n".join(lines)

    def write(self, directory: Path) -> None:
        """Write results.json, README.md, and one PNG per chart where matplotlib is installed."""
        directory.mkdir(parents=True, exist_ok=True)
        facts = environment(self.machine)
        everything = {
            "environment": facts,
            "rows": [asdict(row) | {"verdict": row.verdict} for row in self.rows],
            "charts": [asdict(chart) for chart in self.charts],
            "detail": self.detail,
        }
        (directory / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
        drawn = importlib.util.find_spec("matplotlib") is not None
        if drawn:
            for chart in self.charts:
                _draw(chart, directory / f"{chart.name}.png")
        pictures = [f"![{chart.name}]({chart.name}.png)" for chart in self.charts] if drawn else []
        about = ", ".join(f"{name} {value}" for name, value in facts.items())
        page = [
            "# Transfer backends, one run",
            f"`make bench-transfer`: {about}.",
            self.markdown(),
            *pictures,
        ]
        (directory / "README.md").write_text("\n\n".join(page) + "\n")


def environment(machine: str) -> dict[str, str]:
    """Where and with what a run was made; nothing that names a particular machine."""
    facts = {
        "machine": machine,
        "date": datetime.date.today().isoformat(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
    }
    for name in _PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _draw(chart: Chart, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, values in chart.lines.items():
        axes.plot(chart.x, values, marker="o", label=name)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    axes.set_xticks(chart.x, [f"{x:g}" for x in chart.x])
    axes.minorticks_off()
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
