# SPDX-License-Identifier: Apache-2.0
"""What `kvferry plan` predicts of a running fleet, and what `kvferry bench` measures; a mix that turns.

    python -m benchmarks.plan_reality [--computing | --turning] [--slower FACTOR] [--json FILE]

A fleet of kvferry's agents serves a trace once, so that its agents have measured themselves; then the plan
reads them from the proxy, and the trace is replayed and measured. Steps of paced agents take as long as a
formula says (`tests.standins.paced_agent`), so that four of them do not share two cores; computing ones take
what they take. On a machine that does other work as well, `--slower` leaves more time for a step.
`--turning`: prompts that turn from long to short and back, by every split of four agents and
by four that can do both, and what these do meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvferry.common.roles import Role
from kvferry.deploy.bench.arrivals import SizedArrival, poisson, read_trace
from kvferry.deploy.bench.config import BenchConfig
from kvferry.deploy.bench.measurement import measure
from kvferry.deploy.bench.report import Summary, summarize
from kvferry.deploy.http_client import client_session, fetch_nodes
from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec
from kvferry.deploy.plan.command import PlanConfig, PlanRow, serve
from kvferry.deploy.plan.running_fleet import fetch_agents, server_model
from tests.standins.paced_agent import MODULE, Pace

PACE = Pace(0.08, 0.001, 0.002)
SAMPLE_S = 1.0
EVERY_PROMPT = ("--split-min-tokens", "0")


class Fleet(NamedTuple):
    """Servers by role; those of role `both` choose."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    def __str__(self) -> str:
        return f"{self.both} x both" if self.both else f"{self.prefill} + {self.decode}"

    @property
    def roles(self) -> list[Role]:
        return [*["prefill"] * self.prefill, *["decode"] * self.decode, *["both"] * self.both]  # type: ignore[list-item]


class Load(NamedTuple):
    """A trace and the objectives that it has."""

    arrivals: list[SizedArrival]
    ttft_s: float
    tpot_s: float

    def slower(self, factor: float) -> Load:
        return Load(
            [each._replace(at=factor * each.at) for each in self.arrivals],
            factor * self.ttft_s,
            factor * self.tpot_s,
        )


PACED = Load(
    poisson(lambda rng: rng.randint(64, 1024), lambda rng: rng.randint(8, 48), 1.6, 120, Random(1)), 1.2, 0.12
)
COMPUTING = Load(
    poisson(lambda rng: rng.randint(256, 1536), lambda rng: rng.randint(8, 24), 1.5, 120, Random(2)),
    0.1,
    0.02,
)
FLEETS = (Fleet(2, 2), Fleet(both=4))
SPLITS = (Fleet(1, 3), Fleet(2, 2), Fleet(3, 1), Fleet(both=4))


def turning() -> Load:
    """Long prompts with short answers, short ones with long answers, and back, for 30 s each."""
    rng, arrivals = Random(3), []
    for turn in range(3):
        prompt, answer, rate = ((512, 1024), (16, 32), 2.2) if turn % 2 == 0 else ((16, 64), (48, 96), 5.5)
        for each in poisson(lambda r: r.randint(*prompt), lambda r: r.randint(*answer), rate, 1000, rng):  # noqa: B023
            if each.at < 30.0:
                arrivals.append(each._replace(at=each.at + 30.0 * turn))
    return Load(arrivals, 2.5, 0.16)


def write_trace(load: Load, path: Path) -> None:
    """Write a load as `kvferry plan` and `kvferry bench` read it."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with path.open("w") as file:
        out = csv.writer(file)
        out.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for at, prompt, answer in load.arrivals:
            stamp = (start + timedelta(seconds=at)).strftime("%Y-%m-%d %H:%M:%S.%f")
            out.writerow((stamp, prompt, answer))


def spec(fleet: Fleet, load: Load, pace: Pace | None, directory: Path) -> ClusterSpec:
    args = ("--threads", "1", "--prefix-cache", "false", "--transfer", "tcp")
    given: dict[str, Any] = {} if pace is None else {"module": MODULE, "environment": pace.environment()}
    return ClusterSpec(
        model="ferry-tiny",
        agents=tuple(
            AgentSpec(name=f"{role}-{at}", role=role, args=args, **given)
            for at, role in enumerate(fleet.roles)
        ),
        log_dir=directory / str(fleet).replace(" ", ""),
        proxy_args=(
            *(() if fleet.both else EVERY_PROMPT),
            *("--ttft-objective-s", str(load.ttft_s), "--tpot-objective-s", str(load.tpot_s)),
        ),
    )


async def replay(url: str, load: Load, trace: Path) -> Summary:
    """Replay a load and return its figures."""
    config = BenchConfig(
        server=(url,), trace=trace, requests=len(load.arrivals), rounds=1, warmup=1,
        ttft_ms=1000 * load.ttft_s, tpot_ms=1000 * load.tpot_s,
    )  # fmt: skip
    result = await measure(config, lambda _: None)
    (rounds,) = result.levels[0].rounds.values()
    return summarize(rounds, result.levels[0].level, config.objectives)


async def predict(url: str, fleet: Fleet, load: Load, trace: Path) -> PlanRow:
    """Return what a plan of the running fleet says of the load."""
    arrivals = read_trace(trace)
    model = server_model(await fetch_agents(url, None, None, None))
    print(model)
    config = PlanConfig(ttft_s=load.ttft_s, tpot_ms=1000 * load.tpot_s)
    return await asyncio.to_thread(
        serve, str(fleet), config, arrivals, model, fleet.roles, None if fleet.both else 0
    )


async def compare(fleet: Fleet, load: Load, pace: Pace | None, directory: Path) -> dict[str, Any]:
    """Return a fleet's figures, predicted and measured, and print them."""
    trace = directory / "trace.csv"
    write_trace(load, trace)
    async with Cluster(spec(fleet, load, pace, directory)) as cluster:
        await cluster.wait_ready()
        await replay(cluster.url, load, trace)
        planned = await predict(cluster.url, fleet, load, trace)
        measured = await replay(cluster.url, load, trace)
    assert measured.ttft_ms and measured.tpot_ms and measured.kept_share is not None
    figures = {
        "TTFT p50, ms": (1000 * planned.ttft_p50_s, measured.ttft_ms.p50),
        "TTFT p99, ms": (1000 * planned.ttft_p99_s, measured.ttft_ms.p99),
        "TPOT p50, ms": (planned.tpot_p50_ms, measured.tpot_ms.p50),
        "goodput": (planned.goodput, measured.kept_share),
    }
    for name, (plan, real) in figures.items():
        print(
            f"{fleet!s:10} {name:14} plan {plan:9.3f}  measured {real:9.3f}  ratio {plan / real:.2f}",
            flush=True,
        )
    print(f"{fleet!s:10} load of this machine {os.getloadavg()[0]:.1f}", flush=True)
    return {"fleet": str(fleet), "failed": measured.failed, "figures": figures}


async def sample(url: str, into: list[tuple[float, list[float]]]) -> None:
    """Note once a second what share of each agent's work is prompts."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with client_session(None, None) as http:
        while True:
            works = [node.work for node in (await fetch_nodes(http, url)).nodes if node.work is not None]
            shares = [
                each.prefill_share / max(1e-9, each.prefill_share + each.decode_share) for each in works
            ]
            into.append((loop.time() - began, shares))
            await asyncio.sleep(SAMPLE_S)


async def turn(fleet: Fleet, load: Load, pace: Pace, directory: Path) -> dict[str, Any]:
    """Replay a load that turns, and return its figures and what agents did meanwhile."""
    trace, shares = directory / "trace.csv", list[tuple[float, list[float]]]()
    write_trace(load, trace)
    async with Cluster(spec(fleet, load, pace, directory)) as cluster:
        await cluster.wait_ready()
        sampling = asyncio.ensure_future(sample(cluster.url, shares))
        measured = await replay(cluster.url, load, trace)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    assert measured.ttft_ms and measured.tpot_ms
    print(
        f"{fleet!s:10} goodput {measured.kept_share:.3f}  failed {measured.failed}  "
        f"TTFT p50 {measured.ttft_ms.p50:.0f} p99 {measured.ttft_ms.p99:.0f} ms  "
        f"TPOT p50 {measured.tpot_ms.p50:.1f} p99 {measured.tpot_ms.p99:.1f} ms",
        flush=True,
    )
    if fleet.both:
        print(*lines(shares), sep="\n")
    return {"fleet": str(fleet), "goodput": measured.kept_share, "failed": measured.failed, "shares": shares}


def lines(shares: Sequence[tuple[float, list[float]]]) -> Iterator[str]:
    """Yield what each agent did, every 5 s."""
    for at, each in shares[::5]:
        yield f"  at {at:5.1f} s, prompts in each agent's work: " + " ".join(f"{share:.2f}" for share in each)


async def main(options: argparse.Namespace) -> None:
    found: list[dict[str, Any]] = []
    factor = options.slower
    pace = Pace(*(factor * each for each in PACE))
    with tempfile.TemporaryDirectory() as name:
        if options.turning:
            found = [await turn(fleet, turning().slower(factor), pace, Path(name)) for fleet in SPLITS]
        elif options.computing:
            found = [await compare(fleet, COMPUTING, None, Path(name)) for fleet in FLEETS]
        else:
            found = [await compare(fleet, PACED.slower(factor), pace, Path(name)) for fleet in FLEETS]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("computing", "turning"):
        kinds.add_argument(f"--{kind}", action="store_true")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="so many times slower: paces, loads, objectives"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    asyncio.run(main(parser.parse_args()))
