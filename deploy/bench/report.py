# SPDX-License-Identifier: Apache-2.0
"""Figures of what was measured: for the terminal, and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table

from kvferry.deploy.bench.client import Observation
from kvferry.deploy.bench.config import BenchConfig, Level, Objectives
from kvferry.deploy.bench.measurement import BenchResult, BenchRound, LevelResult

MOST_FAILURES = 5
LATE_MS = 50.0
"""The generator itself is too slow when it sends later than that."""
TOGETHER = 0.1
"""The report says so if a larger share of the events came together with the one before."""
LATENCIES = {"ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "itl_ms": "ITL ms", "e2e_ms": "end to end ms"}


class Quantiles(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """Figures of one server at one level. Latencies are None where no answer has any.

    Rates are over the time that this server was under load. `goodput_per_s` counts the requests that keep
    all objectives, and `kept_share` is their share of all that were sent; None without objectives.
    """

    requests: int
    failed: int
    failures: dict[str, int]
    seconds: float
    completed_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None
    kept_share: float | None
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    sent_late_p99_ms: float | None
    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    itl_ms: Quantiles | None
    e2e_ms: Quantiles | None

    def latency(self, name: str) -> Quantiles | None:
        """Return the figures of one of `LATENCIES`."""
        found: Quantiles | None = getattr(self, name)
        return found


def summarize(rounds: Sequence[BenchRound], level: Level, objectives: Objectives) -> Summary:
    """Return the figures of all these rounds together."""
    seen = [each for one in rounds for each in one.observations]
    well = answered(rounds)
    times = latencies_s(well)
    seconds = sum(one.seconds for one in rounds)
    kept = sum(keeps(each, objectives) for each in well) if objectives else None
    late = [each.sent_s - each.due_s for each in seen] if level.kind != "concurrency" else []
    late_ms = quantiles(late)
    return Summary(
        requests=len(seen),
        failed=len(seen) - len(well),
        failures=dict(Counter(each.failure for each in seen if each.failure).most_common(MOST_FAILURES)),
        seconds=seconds,
        completed_per_s=len(well) / seconds,
        output_tokens_per_s=sum(each.output_tokens or len(each.events_s) for each in well) / seconds,
        goodput_per_s=None if kept is None else kept / seconds,
        kept_share=None if kept is None else kept / len(seen),
        prompt_tokens_mean=_mean(each.prompt_tokens for each in well),
        output_tokens_mean=_mean(each.output_tokens for each in well),
        sent_late_p99_ms=None if late_ms is None else late_ms.p99,
        ttft_ms=quantiles(times["ttft_ms"]),
        tpot_ms=quantiles(times["tpot_ms"]),
        itl_ms=quantiles(times["itl_ms"]),
        e2e_ms=quantiles(times["e2e_ms"]),
    )


def answered(rounds: Sequence[BenchRound]) -> list[Observation]:
    """Return the requests that did not fail."""
    return [each for one in rounds for each in one.observations if not each.failure]


def latencies_s(well: Sequence[Observation]) -> dict[str, list[float]]:
    """Return every latency of requests that did not fail, in seconds, as `LATENCIES` names them."""
    return {
        "ttft_ms": [seen.ttft_s for seen in well],
        "tpot_ms": [seen.tpot_s for seen in well if seen.tpot_s is not None],
        "itl_ms": [late - early for seen in well for early, late in pairwise(seen.events_s)],
        "e2e_ms": [seen.end_s for seen in well],
    }


def keeps(seen: Observation, objectives: Objectives) -> bool:
    """Whether a request that did not fail keeps all objectives; one token alone keeps any TPOT."""
    bounds = (
        (seen.ttft_s, objectives.ttft_ms),
        (seen.tpot_s or 0.0, objectives.tpot_ms),
        (seen.end_s, objectives.e2e_ms),
    )
    return all(most is None or seconds * 1e3 <= most for seconds, most in bounds)


def quantiles(seconds: Iterable[float]) -> Quantiles | None:
    """Return the figures of times in seconds, in ms; between two of them by linear interpolation."""
    ordered = sorted(1e3 * value for value in seconds)
    if not ordered:
        return None

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        return below + (above - below) * (place % 1)

    return Quantiles(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99), ordered[-1])


def summaries(result: LevelResult, objectives: Objectives) -> dict[str, Summary]:
    """Return the figures of one level by the name of the server."""
    return {name: summarize(rounds, result.level, objectives) for name, rounds in result.rounds.items()}


def tables(config: BenchConfig, result: BenchResult) -> RenderableType:
    """Return what is shown on the terminal."""
    return Group(*(part for level in result.levels for part in _level_tables(config, level)))


def _level_tables(config: BenchConfig, result: LevelResult) -> list[RenderableType]:
    found = summaries(result, config.objectives)
    size = f"{_counted(config.requests, 'request')} in {_counted(config.num_rounds, 'round')}"
    parts: list[RenderableType] = [f"\n{result.level}, {size}\n"]
    parts += [_totals_table(found, config.objectives), "", _latency_table(config, result, found)]
    for name, summary in found.items():
        parts += [f"{name}: {number} failed: {reason}" for reason, number in summary.failures.items()]
        gaps = latencies_s(answered(result.rounds[name]))["itl_ms"]
        if (together := gaps.count(0.0)) > TOGETHER * len(gaps):
            parts.append(
                f"{name}: {100 * together / len(gaps):.0f} % of the events came together with the one "
                "before, which ITL counts as 0 ms; TPOT is the mean time per token"
            )
        if (summary.sent_late_p99_ms or 0.0) > LATE_MS:
            parts.append(
                f"{name}: kvferry bench sent requests up to {summary.sent_late_p99_ms:.0f} ms late (p99): "
                "this machine is too slow for the load, and the latencies are partly its own"
            )
    return parts


def _totals_table(found: dict[str, Summary], objectives: Objectives) -> Table:
    table = _table("server", "answered", "failed", "requests/s", "tokens/s")
    if objectives:
        table.add_column("goodput/s", justify="right")
        table.add_column("kept", justify="right")
    table.add_column("prompt tokens", justify="right")
    table.add_column("answer tokens", justify="right")
    for name, summary in found.items():
        cells = [name, str(summary.requests - summary.failed), str(summary.failed)]
        cells += [_number(summary.completed_per_s), _number(summary.output_tokens_per_s)]
        if summary.goodput_per_s is not None and summary.kept_share is not None:
            cells += [_number(summary.goodput_per_s), f"{100 * summary.kept_share:.1f} %"]
        cells += [_number(summary.prompt_tokens_mean), _number(summary.output_tokens_mean)]
        table.add_row(*cells)
    return table


def _latency_table(config: BenchConfig, result: LevelResult, found: dict[str, Summary]) -> Table:
    """One row for each latency of each server; with several servers also what it is of the first's."""
    table = _table("", "server", "mean", "p50", "p90", "p99", "max")
    compared = len(found) > 1
    if config.num_rounds > 1:
        table.add_column("p50 of the rounds", justify="right")
    if compared:
        table.add_column("p50 ratio", justify="right")
        table.add_column("p99 ratio", justify="right")
    first = next(iter(found.values()))
    for latency, title in LATENCIES.items():
        for name, summary in found.items():
            values, base = summary.latency(latency), first.latency(latency)
            cells = [title if summary is first else "", name]
            cells += map(_number, msgspec.structs.astuple(values)) if values else ["-"] * 5
            if config.num_rounds > 1:
                cells.append(_range(result.rounds[name], result.level, config.objectives, latency))
            if compared:
                cells += _ratios(values, base)
            table.add_row(*cells)
    return table


def _ratios(values: Quantiles | None, base: Quantiles | None) -> list[str]:
    if values is None or base is None or not base.p50 or not base.p99:
        return ["-", "-"]
    return [f"{values.p50 / base.p50:.2f}", f"{values.p99 / base.p99:.2f}"]


def _range(rounds: Sequence[BenchRound], level: Level, objectives: Objectives, latency: str) -> str:
    """Return the lowest and highest p50 of the rounds: how much the machine and the servers vary."""
    each = [summarize([one], level, objectives).latency(latency) for one in rounds]
    middles = [values.p50 for values in each if values is not None]
    return f"{_number(min(middles))} to {_number(max(middles))}" if middles else "-"


def as_json(config: BenchConfig, result: BenchResult, version: str) -> bytes:
    """Return configuration, figures and every request. Times end with their unit's name."""
    levels: list[dict[str, Any]] = []
    for level in result.levels:
        found = summaries(level, config.objectives)
        servers = {
            name: {
                "summary": summary,
                "rounds": [
                    {
                        "summary": summarize([one], level.level, config.objectives),
                        "requests": one.observations,
                    }
                    for one in level.rounds[name]
                ],
            }
            for name, summary in found.items()
        }
        levels.append({"level": level.level, "servers": servers})
    document = {
        "kvferry": version,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config,
        "targets": config.targets,
        "models": result.models,
        "levels": levels,
    }
    return msgspec.json.encode(document, enc_hook=_path) + b"\n"


def _path(value: Any) -> str:
    return str(value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        is_name = number == 0 or column == "server"
        table.add_column(column, justify="left" if is_name else "right", overflow="fold")
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None) -> str:
    """Return a number with three digits that count."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
