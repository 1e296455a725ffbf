# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive by chance, and what their clients see of them.

All times are by `time.perf_counter`, which on Linux is the clock that all processes of a host share.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pd.fleet import MODEL, System
from kvferry.deploy.bench.arrivals import SizedArrival
from kvferry.deploy.bench.client import Observation, connected_client
from kvferry.deploy.bench.config import BenchConfig, Level, Target
from kvferry.deploy.bench.measurement import run_round
from kvferry.deploy.bench.workload import PlannedRequest

LONG, SHORT, ANSWER = 8192, 256, 256
"""Tokens: half the prompts have the one length, half the other."""
OBJECTIVES = ((2.0, 0.015), (2.0, 0.030))
"""TTFT and TPOT in seconds, for goodput: the share of all requests that keep both."""
WARM_UP_RATE = 1.0
"""Requests a second of each pair."""
CONFIG = BenchConfig(model=MODEL, timeout_s=300.0)


@dataclass(slots=True)
class Seen:
    """One request. `times` are those of its events with a choice, `error` is empty if it ended well."""

    request_id: str
    prompt_tokens: int
    sent: float
    times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


async def offer(url: str, rate: float, seconds: float, vocabulary: int, seed: int = 1) -> list[Seen]:
    """Send requests of the mix, `rate` a second, and wait for all of them."""
    return await send(url, rate, requests(mix(rate, seconds, seed), vocabulary, seed))


def mix(rate: float, seconds: float, seed: int = 1) -> list[SizedArrival]:
    """Return the arrivals of long and short prompts, with exponential gaps."""
    rng, load, due = random.Random(seed), list[SizedArrival](), 0.0
    while (due := due + rng.expovariate(rate)) < seconds:
        load.append(SizedArrival(due, rng.choice((LONG, SHORT)), ANSWER))
    return load


def requests(load: Sequence[SizedArrival], vocabulary: int, seed: int) -> Iterator[PlannedRequest]:
    """Make prompts of random tokens."""
    rng = random.Random(seed)
    for each in load:
        prompt = [rng.randrange(3, vocabulary) for _ in range(each.prompt_tokens)]
        yield PlannedRequest(each.at, prompt, each.answer_tokens)


async def send(url: str, rate: float, requests: Iterator[PlannedRequest]) -> list[Seen]:
    """Send requests when they are due, and wait for all of them. `rate`: how many a second, about."""
    async with connected_client(Target(url, url), CONFIG, count_empty=True) as client:
        start = time.perf_counter()
        done = await run_round(client, Level("rate", rate), requests, start)
    return sorted((_seen(each, start) for each in done.observations), key=lambda one: one.sent)


def _seen(observed: Observation, start: float) -> Seen:
    sent = start + observed.sent_s
    times = [sent + at for at in observed.events_s]
    error = observed.failure or (f"{len(times)} events" if len(times) < 2 else "")
    return Seen(observed.request_id, observed.prompt_tokens or 0, sent, times, error)


def summary(seen: Sequence[Seen], handed_over: Sequence[float]) -> dict[str, object]:
    """Figures of one run, in ms but for counts, TTFT (s) and goodput.

    Args:
        handed_over: Seconds from each prefill's response to the first event of the decode.
    """
    well = [one for one in seen if not one.error]
    gaps = np.concatenate([np.diff(one.times) for one in well]) if well else np.zeros(0)
    ttft, tpot = np.array([one.ttft for one in well]), np.array([one.tpot for one in well])
    return {
        "requests": len(seen),
        "failed": len(seen) - len(well),
        "errors": sorted({one.error for one in seen if one.error})[:3],
        "ttft_s": quantiles(ttft),
        "handover_ms": quantiles(np.array(handed_over) * 1e3),
        "itl_ms": quantiles(gaps * 1e3),
        "tpot_ms": quantiles(tpot * 1e3),
        "goodput": {
            f"{most_ttft:g} s, {most_tpot * 1e3:g} ms": round(
                float(((ttft <= most_ttft) & (tpot <= most_tpot)).sum()) / max(1, len(seen)), 3
            )
            for most_ttft, most_tpot in OBJECTIVES
        },
    }


def read_log(proxy_log: Path, since: int) -> list[dict[str, Any]]:
    """What the proxy's log says of each request, from a byte on."""
    with proxy_log.open("rb") as log:
        log.seek(since)
        lines = log.read().decode(errors="replace").splitlines()
    return [json.loads(line.split(" request ", 1)[1]) for line in lines if ' request {"' in line]


def handovers(system: System, seen: Iterable[Seen], logged: Iterable[dict[str, Any]]) -> list[float]:
    """Seconds from each prefill's response to the decode's first token.

    With our connector the first event is the prefill's token, passed on when it has answered, and the second
    the decode's: clients see it. Of other pairs the proxy's log says it. None where servers also serve alone.
    """
    if system in ("by-hand", "auto", "auto-both"):
        return []
    if system.startswith("kvferry"):
        return [one.times[1] - one.times[0] for one in seen if not one.error]
    phases = [each["phases_s"] for each in logged]
    return [each["decode_wait"] for each in phases if "prefill" in each and "decode_wait" in each]


def write_rows(path: Path, runs: dict[str, list[Seen]]) -> None:
    """A line for each request of each run, gzipped CSV; times in ms."""
    with gzip.open(path, "wt", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            (
                "run",
                "sent",
                "prompt_tokens",
                "events",
                "ttft",
                "second",
                "tpot",
                "itl_p99",
                "itl_max",
                "error",
            )
        )
        for run, seen in runs.items():
            began = seen[0].sent if seen else 0.0
            for one in seen:
                figures: list[float] = []
                if not one.error:
                    gaps = np.diff(one.times)
                    figures = [one.ttft, gaps[0], one.tpot, float(np.quantile(gaps, 0.99)), gaps.max()]
                rounded = [f"{each * 1e3:.2f}" for each in figures] or [""] * 5
                sent = f"{(one.sent - began) * 1e3:.1f}"
                rows.writerow((run, sent, one.prompt_tokens, len(one.times), *rounded, one.error))


def quantiles(values: np.ndarray) -> dict[str, float]:
    """p50 and p99; nothing of nothing."""
    if not len(values):
        return {}
    return {name: round(float(np.quantile(values, q)), 3) for name, q in (("p50", 0.5), ("p99", 0.99))}
