# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bench.pd --python PYTHON --model DIR --gpus 0,1`: what a pair of GPUs gives its clients.

Servers of each system are started, asked at each rate, and ended, one system after the other. vLLM is what
PYTHON has installed; kvferry has to be importable there (docs/engines/vllm.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from tests.bench.pd.check import late_readers, same_answers
from tests.bench.pd.fleet import Setup, System, running
from tests.bench.pd.load import offer, read_handovers, summary
from tests.gpu import gpu_names

ROOT = Path(__file__).parents[3]
WARM_UP = (1.0, 5.0)
"""Requests a second, and seconds."""


def main() -> int:
    options = _parser().parse_args()
    gpus = options.gpus.split(",")
    if len(gpus) != 2:
        print(f"--gpus takes those of two servers, as in 0,1; got {options.gpus!r}", file=sys.stderr)
        return 2
    options.logs.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        python=options.python,
        model=options.model,
        gpus=(gpus[0], gpus[1]),
        arguments=tuple(options.arguments),
        log_dir=options.logs,
    )
    results: dict[str, Any] = {"gpus": gpu_names(), "servers_on": gpus, "arguments": options.arguments}
    for step in options.steps:
        results[step] = asyncio.run(_STEPS[step](setup, options))
        print(json.dumps({step: results[step]}, indent=1), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


async def _load(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    vocabulary = json.loads((setup.model / "config.json").read_text())["vocab_size"]
    figures: dict[str, Any] = {}
    for system in options.systems:
        async with running(system, setup) as fleet:
            await offer(fleet.url, *WARM_UP, vocabulary, seed=0)
            for rate in options.rates:
                since = fleet.proxy_log.stat().st_size if fleet.proxy_log else 0
                seen = await offer(fleet.url, rate, options.seconds, vocabulary)
                handovers = read_handovers(fleet.proxy_log, since) if fleet.proxy_log else []
                figures[f"{system} at {rate:g}/s"] = summary(seen, handovers)
                print(f"{system} at {rate:g}/s: {json.dumps(summary(seen, handovers))}", flush=True)
    return figures


async def _same(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    checked = _for_checks(setup, options)
    return {system: await same_answers(checked, system, options.prompts) for system in _ours(options)}


async def _late(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    checked = _for_checks(setup, options)
    return {system: await late_readers(checked, system, options.trials) for system in _ours(options)}


def _for_checks(setup: Setup, options: argparse.Namespace) -> Setup:
    """Answers are compared of a model that has been trained: others hardly prefer one token to another."""
    words = ("--max-model-len", "2048", "--gpu-memory-utilization", "0.2", "--max-num-seqs", "32")
    return replace(setup, model=options.check_model, arguments=words)


def _ours(options: argparse.Namespace) -> list[System]:
    return [system for system in options.systems if system.startswith("kvferry")]


_STEPS = {"load": _load, "same": _same, "late": _late}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.bench.pd", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="vLLM's Python")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--check-model", type=Path, default=ROOT / "deploy" / "models" / "ferry-tiny")
    parser.add_argument("--gpus", default="0,1", help="of the two servers; one twice for a trial on one GPU")
    parser.add_argument("--steps", nargs="+", choices=list(_STEPS), default=["load"])
    parser.add_argument(
        "--systems", nargs="+", choices=get_args(System), default=["kvferry-cuda_ipc", "nixl", "together"]
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[2.0, 4.0, 6.0, 8.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of load at each rate")
    parser.add_argument("--prompts", type=int, default=200, help="of the step same")
    parser.add_argument("--trials", type=int, default=100, help="of the step late")
    parser.add_argument("--logs", type=Path, default=Path("logs/bench-pd"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("arguments", nargs="*", help="further ones of every vLLM server, behind --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
