# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.pd --python PYTHON --model DIR --gpus 0,1`: what a pair of GPUs gives its clients.

Each system is asked at each rate, and with each trace, one system after the other. Those of two servers that
can do both share them: each has a proxy of its own, which pins their roles. The steps
`same` and `late` take our systems, `decode` and `timeline` the first of them; `turning` has a server on each
GPU, in every split, and so has `conversations`, half of them for prefills. vLLM is what PYTHON has
installed; kvferry has to be importable there (docs/engines/vllm.md). The exit status is 1 if requests failed,
or if a step broke off; what it had found by then is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import aiohttp

from benchmarks.pd.check import late_readers, same_answers
from benchmarks.pd.conversations import converse
from benchmarks.pd.decode_steps import decode_steps
from benchmarks.pd.fleet import (
    KINDS,
    SHARING,
    Running,
    Setup,
    System,
    kv_moved,
    running,
    sharing,
    vllm_router,
)
from benchmarks.pd.load import (
    WARM_UP_RATE,
    Seen,
    handovers,
    mix,
    offer,
    read_log,
    requests,
    send,
    summary,
    write_rows,
)
from benchmarks.pd.report import facts, write_report
from benchmarks.pd.timeline import timeline
from benchmarks.pd.turning import fleets, pairs, plans, turn
from kvferry.deploy.bench.arrivals import SizedArrival, at_rate, read_trace
from kvferry.deploy.launcher import LaunchError
from tests.helpers.gpu import gpu_names

ROOT = Path(__file__).parents[2]
WARM_UP = (WARM_UP_RATE, 5.0)
"""Requests a second, and seconds."""
CHECK_POOL_BYTES = 1 << 30
MOST_PROMPT = 15_000
"""Tokens of a trace's prompt."""
Found = dict[str, dict[str, Any]]
"""The figures of a step, by run or system. A step that breaks off leaves what it has found."""
SYSTEMS = ["kvferry-cuda_ipc", "by-hand", "auto", "auto-both", "nixl", "together", "kvferry-nixl"]
CONVERSING = ("kept", "kvferry-cuda_ipc", "nixl")
"""Systems that the step `conversations` compares."""


def main() -> int:
    options = _parser().parse_args()
    gpus = options.gpus.split(",")
    is_fleet = bool({"turning", "conversations"} & set(options.steps))
    ranks = [tp * dp for tp, dp in zip(options.tp, options.dp, strict=True)]
    if is_fleet and (len(options.steps) > 1 or sum(ranks) > 2):
        print("the steps turning and conversations have a server on each GPU, and go alone", file=sys.stderr)
        return 2
    if not is_fleet and len(gpus) != sum(ranks):
        print(
            f"--gpus takes one for each rank, {sum(ranks)} with these --tp and --dp; got {options.gpus!r}",
            file=sys.stderr,
        )
        return 2
    if not is_fleet and options.steps != ["load"] and not _ours(options):
        print(f"--systems has none of ours, which {' '.join(options.steps)} is about", file=sys.stderr)
        return 2
    options.logs.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        python=options.python,
        model=options.model,
        gpus=tuple(gpus) if is_fleet else (",".join(gpus[: ranks[0]]), ",".join(gpus[ranks[0] :])),
        arguments=tuple(options.arguments),
        prefill_arguments=_parallel(options, 0),
        decode_arguments=_parallel(options, 1),
        settings=dict(options.setting),
        router=tuple(options.router.split()),
        log_dir=options.logs,
    )
    results: dict[str, Any] = {
        "environment": facts(options.python),
        "gpus": gpu_names(),
        "servers_on": list(setup.gpus),
        "settings": setup.settings,
        "arguments": options.arguments,
    }
    failures: list[str] = []
    for step in options.steps:
        found = results[step] = {}
        try:
            asyncio.run(_STEPS[step](setup, options, found))
        except* (AssertionError, TimeoutError, LaunchError, OSError, aiohttp.ClientError) as errors:
            failures.append(f"{step}: not complete: {errors.exceptions}")
        failures += [
            f"{step}, {run}: {figures['failed']} of {figures['requests']} requests failed"
            for run, figures in found.items()
            if figures.get("failed")
        ]
        print(json.dumps({step: found}, indent=1), flush=True)
        write_report(options.logs, results)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


async def _load(setup: Setup, options: argparse.Namespace, found: Found) -> None:
    """Every system with every load. What clients saw is written beside the figures as it comes; a system that
    does not start leaves the others their turn.
    """
    load = _Load(setup, options, found)
    shared = [system for system in options.systems if system in SHARING]
    if shared:
        async with sharing(shared, setup) as fleets:
            async for system, fleet in fleets:
                await load.offer(system, system, fleet, fleet.url)
    for system in [each for each in options.systems if each not in shared]:
        try:
            async with running(system, setup) as fleet:
                await load.offer(system, system, fleet, fleet.url)
                if system == "nixl" and setup.router:
                    async with vllm_router(setup, fleet.servers) as url:
                        await load.offer("nixl, vllm-router", system, fleet, url)
        except* (AssertionError, TimeoutError, LaunchError) as errors:
            print(f"{system}: left out: {errors.exceptions}", flush=True)


class _Load:
    """What came of the step `load`: figures by run, and each client's view in `requests.csv.gz`."""

    def __init__(self, setup: Setup, options: argparse.Namespace, found: Found) -> None:
        self._setup = setup
        self._options = options
        self._found = found
        self._rows: dict[str, list[Seen]] = {}

    async def offer(self, name: str, system: System, fleet: Running, url: str) -> None:
        """All rates, one after the other, at a URL of a system. `name`: of the runs."""
        vocabulary = _vocabulary(self._setup)
        await offer(url, *WARM_UP, vocabulary, seed=0)
        for what, rate, arrivals in _loads(self._options):
            run = f"{name}{what} at {rate:g}/s"
            connector = KINDS[system].connector
            since = fleet.proxy_log.stat().st_size if fleet.proxy_log else 0
            before = None if connector is None else await kv_moved(connector, fleet.servers)
            seen = await send(url, rate, requests(arrivals, vocabulary, seed=1))
            logged = read_log(fleet.proxy_log, since) if fleet.proxy_log else []
            self._found[run] = figures = summary(seen, handovers(system, seen, logged))
            if before is not None and connector is not None:
                figures["kv"] = (await kv_moved(connector, fleet.servers)).since(before)
            if system == "auto-both":
                figures["plan"] = await plans(url, arrivals, pairs())
            print(f"{run}: {json.dumps(figures)}", flush=True)
            self._rows[run] = seen
            write_rows(self._options.logs / "requests.csv.gz", self._rows)


async def _same(setup: Setup, options: argparse.Namespace, found: Found) -> None:
    await same_answers(_for_checks(setup, options), _ours(options), options.prompts, found)


async def _late(setup: Setup, options: argparse.Namespace, found: Found) -> None:
    for system in _ours(options):
        found[system] = await late_readers(_for_checks(setup, options), system, options.trials)


async def _decode(setup: Setup, options: argparse.Namespace, found: Found) -> None:
    system = _ours(options)[0]
    await decode_steps(setup, system, _vocabulary(setup), found.setdefault(system, {}))


async def _timeline(setup: Setup, options: argparse.Namespace, found: Found) -> None:
    """At each rate, of the first of our systems, whose servers note more than they do under `load`."""
    path = options.logs / "timeline.jsonl"
    path.unlink(missing_ok=True)
    system = _ours(options)[0]
    async with running(system, replace(setup, timeline=path)) as fleet:
        await offer(fleet.url, *WARM_UP, _vocabulary(setup), seed=0)
        for rate in options.timeline_rates:
            seen = await offer(fleet.url, rate, options.seconds, _vocabulary(setup))
            logged = read_log(fleet.proxy_log, 0) if fleet.proxy_log else []
            found[f"{system} at {rate:g}/s"] = timeline(path, seen, logged)


async def _turning(setup: Setup, options: argparse.Namespace, found: Found) -> None:
    """Every fleet that is asked for, one after the other."""
    rows: dict[str, list[Seen]] = {}
    names = options.fleets or list(fleets(len(setup.gpus)))
    async for name, seen in turn(names, setup, options.seconds, _vocabulary(setup), found):
        rows[name] = seen
        brief = {key: value for key, value in found[name].items() if key != "prompt shares"}
        print(f"{name}: {json.dumps(brief)}", flush=True)
        write_rows(options.logs / "requests.csv.gz", rows)


async def _conversations(setup: Setup, options: argparse.Namespace, found: Found) -> None:
    systems = [each for each in options.systems if each in CONVERSING]
    await converse(systems, setup, _vocabulary(setup), found)


def _loads(options: argparse.Namespace) -> Iterator[tuple[str, float, Sequence[SizedArrival]]]:
    """Yield the mix at each rate, then each trace at its rate, with a name; prompts that are too long for the
    model are cut.
    """
    for rate in options.rates:
        yield "", rate, mix(rate, options.seconds)
    for path, rate in options.traces:
        load = [each for each in at_rate(read_trace(path), rate) if each.at < options.seconds]
        cut = [each._replace(prompt_tokens=min(each.prompt_tokens, MOST_PROMPT)) for each in load]
        yield f", {path.name.split('.')[0]}", rate, cut


def _trace(word: str) -> tuple[Path, float]:
    path, _, rate = word.rpartition("@")
    return Path(path), float(rate)


def _parallel(options: argparse.Namespace, side: int) -> tuple[str, ...]:
    """vLLM's arguments for the ranks of a server."""
    words = ["--tensor-parallel-size", str(options.tp[side])]
    if options.dp[side] > 1:
        words += ["--data-parallel-size", str(options.dp[side])]
    if options.ep:
        words += ["--enable-expert-parallel"]
    return tuple(words)


def _vocabulary(setup: Setup) -> int:
    return int(json.loads((setup.model / "config.json").read_text())["vocab_size"])


def _for_checks(setup: Setup, options: argparse.Namespace) -> Setup:
    """Answers are compared of a model that has been trained: others hardly prefer one token to another."""
    words = ("--dtype", options.check_dtype, "--max-model-len", "2048", "--max-num-seqs", "32")
    # A given size of the pool, so that several checks can share GPUs: vLLM measures no free memory then.
    memory = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(CHECK_POOL_BYTES))
    return replace(setup, model=options.check_model, arguments=words + memory)


def _ours(options: argparse.Namespace) -> list[System]:
    """Our systems, each over one backend."""
    return [system for system in options.systems if system.startswith("kvferry")]


def _setting(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    return name, json.loads(value)


_STEPS = {
    "same": _same,
    "late": _late,
    "load": _load,
    "decode": _decode,
    "timeline": _timeline,
    "turning": _turning,
    "conversations": _conversations,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.pd", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="vLLM's Python")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--check-model", type=Path, default=ROOT / "deploy" / "models" / "ferry-tiny")
    parser.add_argument(
        "--check-dtype",
        default="auto",
        help="of the steps same and late; in float32 no answer depends on what is computed beside it",
    )
    parser.add_argument(
        "--gpus",
        default="0,1",
        help="of the ranks, the prefill server's first; one twice for a trial on one GPU",
    )
    parser.add_argument(
        "--tp", nargs=2, type=int, default=[1, 1], metavar=("PREFILL", "DECODE"), help="tensor parallel sizes"
    )
    parser.add_argument(
        "--dp", nargs=2, type=int, default=[1, 1], metavar=("PREFILL", "DECODE"), help="data parallel sizes"
    )
    parser.add_argument("--ep", action="store_true", help="spread the experts over all ranks of a server")
    parser.add_argument(
        "--setting",
        nargs="*",
        type=_setting,
        default=[],
        metavar="NAME=JSON",
        help="further ones of our connector",
    )
    parser.add_argument("--steps", nargs="+", choices=list(_STEPS), default=["load"])
    parser.add_argument("--systems", nargs="+", choices=get_args(System), default=SYSTEMS)
    parser.add_argument(
        "--router", default="", help="command of vllm-router, to be put before `nixl` as well"
    )
    parser.add_argument("--rates", nargs="*", type=float, default=[2.0, 4.0, 6.0, 8.0])
    parser.add_argument(
        "--traces",
        nargs="*",
        type=_trace,
        default=[],
        metavar="FILE@RATE",
        help="of the step load, after the rates",
    )
    parser.add_argument(
        "--timeline-rates", nargs="+", type=float, default=[2.0, 6.0], help="of the step timeline"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of load at each rate, or of each turn")
    parser.add_argument("--fleets", nargs="*", help="of the step turning, such as auto, together, '1 + 3'")
    parser.add_argument("--prompts", type=int, default=200, help="of the step same")
    parser.add_argument("--trials", type=int, default=100, help="of the step late")
    parser.add_argument(
        "--logs", type=Path, default=Path("logs/bench-pd"), help="folder for figures and logs"
    )
    parser.add_argument("arguments", nargs="*", help="further ones of every vLLM server, behind --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
