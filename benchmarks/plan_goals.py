# SPDX-License-Identifier: Apache-2.0
"""`make plan-goals`: the proxy's choice beside every fixed split, in virtual time.

    python -m benchmarks.plan_goals [--servers 8 64] [--requests N] [--rates R…] [--json FILE] TRACE…

For each trace, and a mix of prompts of 256 and 8,192 tokens, the highest rate is sought that the best of all
fixed settings of 8 servers (splits with and without a threshold, and all servers together) serves with 0.99
of the goodput that it has at one request a second. Then all settings and the choice serve 70, 90 and 100 % of
it, with the same defaults for all loads. More than 8 servers get a load once for every 8 of them, each time
from another moment on; of these, splits by an eighth are tried, and then some around the best, closer and
closer. Last, 8 servers get loads that turn from one kind of request to another. The exit status is 1 if a
goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.turns import Kind, turning
from kvferry.common.roles import Role
from kvferry.deploy.bench.arrivals import SizedArrival, at_rate, poisson, read_trace
from kvferry.deploy.plan.command import (
    EVERY_PROMPT,
    MAX_SPLITS,
    PlanConfig,
    PlanRow,
    serve,
    split_outcomes,
)
from kvferry.deploy.plan.simulation import ServerModel

CONFIG = PlanConfig()
MODEL = ServerModel()
KEPT = 0.99
LEVELS = (0.7, 0.9, 1.0)
SEARCH_STEPS = 5
GOODPUT_RATIO, TTFT_RATIO = 0.97, 1.1
"""The goals: a part of the best fixed setting's goodput, and at most so many times its TTFT p50."""
EQUAL = 0.002
"""Of settings whose goodputs differ by less, the best is the one with the earliest first tokens."""
TURN_S = 120.0
TURN_GAIN = 1.1
"""Where the mix turns, the choice is to keep so many times what each fixed setting keeps."""
TURNS = 4
TURNING: dict[str, tuple[Kind, Kind]] = {
    "prompts, answers": ((8192, 32, 24.0), (256, 1024, 40.0)),
    "long, short": ((8192, 128, 22.0), (512, 256, 110.0)),
}
"""For 8 servers."""


def best_of(rows: Sequence[PlanRow]) -> PlanRow:
    most = max(row.goodput for row in rows)
    return min((row for row in rows if row.goodput >= most - EQUAL), key=lambda row: row.ttft_p50_s)


def fixed(load: Sequence[SizedArrival], servers: int) -> Iterator[PlanRow]:
    """Yield what fixed settings make of a load."""
    both: list[Role] = ["both"] * servers
    yield serve("together", CONFIG, load, MODEL, both, EVERY_PROMPT)
    step, splits = max(1, servers // MAX_SPLITS), dict[int, PlanRow]()
    around = list(range(step, servers, step))
    while step:
        for prefills in around:
            if 0 < prefills < servers and prefills not in splits:
                rows = list(split_outcomes(CONFIG, load, MODEL, servers, prefills))
                splits[prefills] = best_of(rows)
                yield from rows
        best, step = best_of(list(splits.values())), step // 2
        [middle] = [prefills for prefills, row in splits.items() if row is best]
        around = [middle - step, middle + step]


def chosen(load: Sequence[SizedArrival], servers: int) -> PlanRow:
    both: list[Role] = ["both"] * servers
    return serve("auto", CONFIG, load, MODEL, both, None)


def highest_rate(load: Sequence[SizedArrival]) -> float:
    """Return the rate that some fixed setting of 8 servers serves with `KEPT` of the goodput that the best
    has at one request a second: some prompts may be too long for the objective at any rate.
    """
    kept = KEPT * best_of(list(fixed(at_rate(load, 1.0), 8))).goodput

    def is_served(rate: float) -> bool:
        return any(row.goodput >= kept for row in fixed(at_rate(load, rate), 8))

    low, high = 1.0, 2.0
    while is_served(high):
        low, high = high, 2 * high
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_served(middle) else (low, middle)
    return low


def superposed(load: Sequence[SizedArrival], copies: int) -> list[SizedArrival]:
    """Return a load so many times at once, each time from another moment on, its beginning after its end."""
    span = load[-1].at * (len(load) + 1) / len(load)
    return sorted(
        each._replace(at=(each.at + span * copy / copies) % span) for copy in range(copies) for each in load
    )


def compared(
    name: str, load: Sequence[SizedArrival], servers: int, gain: float, ttft: float
) -> dict[str, Any]:
    best, auto = best_of(list(fixed(load, servers))), chosen(load, servers)
    ratios = auto.goodput / max(best.goodput, 1e-9), auto.ttft_p50_s / best.ttft_p50_s
    is_kept = ratios[0] >= gain and ratios[1] <= ttft
    print(
        f"{servers:2} {name:34} {best.name:18} {best.goodput:.3f} {best.ttft_p50_s:.3f} s   "
        f"auto {auto.goodput:.3f} {auto.ttft_p50_s:.3f} s   {ratios[0]:.3f} {ratios[1]:.2f}"
        f"{'' if is_kept else '   missed'}",
        flush=True,
    )
    return {
        "load": name, "servers": servers, "best": best._asdict(), "auto": auto._asdict(), "kept": is_kept
    }  # fmt: skip


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    def choose(rng: Random) -> int:
        return rng.choice((256, 8192))

    loads = {path.name.split(".")[0]: read_trace(path)[: options.requests] for path in options.traces}
    loads["half long, half short"] = poisson(choose, lambda _: 256, 8.0, options.requests, Random(0))
    highest = options.rates or list(map(highest_rate, loads.values()))
    for servers in options.servers:
        eighths = max(1, servers // 8)
        for (name, load), most in zip(loads.items(), highest, strict=True):
            for level in LEVELS:
                rate = level * most * servers / 8
                several = at_rate(superposed(load[: options.requests // eighths], eighths), rate)
                yield compared(f"{name}, {rate:.1f}/s", several, servers, GOODPUT_RATIO, TTFT_RATIO)
    for name, kinds in TURNING.items() if 8 in options.servers else ():
        yield compared(f"turns: {name}", turning(kinds, TURNS, TURN_S), 8, TURN_GAIN, float("inf"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plan_goals", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="CSV or JSONL, gzipped or not")
    parser.add_argument("--servers", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--requests", type=int, default=2500, help="of each load")
    parser.add_argument("--rates", nargs="+", type=float, help="of each load, instead of seeking the highest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    print("servers, load, best fixed setting, its goodput and TTFT p50, by choice, ratios of both")
    found = list(results(options))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(each["kept"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
