# SPDX-License-Identifier: Apache-2.0
"""`make bench-wrong`: wrong answers per 1,000 requests under faults.

Each cell is a system under a fault. Its raw file has a line for each wave of requests, written as the wave
ends; a run goes on where the files end, and makes the page anew from all of them after each wave.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from benchmarks.pd.report import facts
from benchmarks.proxy_cost import RIVALS
from benchmarks.wrong.faults import FAULTS
from benchmarks.wrong.questions import Asker, Outcome, Reference, ask_plain, questions
from benchmarks.wrong.report import cell_file, read_cell, write_page
from benchmarks.wrong.systems import MAX_RUNNING, SYSTEMS, Pair
from kvferry.deploy.launcher import LaunchError
from tests.system.sglang.servers import PYTHON as SGLANG_PYTHON
from tests.system.vllm.servers import PYTHON as VLLM_PYTHON
from tests.system.vllm.servers import vllm_server

ROOT = Path(__file__).parents[2]


async def main(options: argparse.Namespace) -> int:
    random.seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    options.logs.mkdir(parents=True, exist_ok=True)
    _note_facts(options.out / "facts.json")
    prompts = questions()
    references, failed = await _references(options, prompts), False
    for name in options.system:
        system = SYSTEMS[name]
        cells = [fault for fault in options.fault if not system.faults or fault in system.faults]
        while waiting := [fault for fault in cells if _missing(options, name, fault)]:
            variant = FAULTS[waiting[0]].variant
            logs = options.logs / f"{name}-{variant}-{time.strftime('%H%M%S')}"
            logs.mkdir()
            fault = waiting[0]
            try:
                async with Pair(system, variant, logs) as pair:
                    for fault in waiting:
                        if FAULTS[fault].variant != variant:
                            continue
                        if not await _measure(options, name, fault, pair, prompts, references):
                            break
            except* (AssertionError, TimeoutError, LaunchError, OSError, aiohttp.ClientError) as errors:
                print(f"{name}, {fault}: broke off: {errors.exceptions}", file=sys.stderr)
                cells.remove(fault)
                failed = True
    return 1 if failed else 0


def _note_facts(path: Path) -> None:
    """Note today's versions of all that is installed, beside those of other days; of what several have,
    vLLM's.
    """
    router = Path(RIVALS["vllm-router"][0]).with_name("python")
    pythons = [python for python in (router, SGLANG_PYTHON, VLLM_PYTHON) if python.exists()]
    found = dict(fact for python in pythons for fact in facts(str(python)).items())
    days = json.loads(path.read_text()) if path.exists() else {}
    days[found.pop("date")] = found
    path.write_text(json.dumps(days, indent=1) + "\n")


def _missing(options: argparse.Namespace, system: str, fault: str) -> int:
    """Requests that the cell still lacks."""
    return max(0, _wanted(options, system) - len(read_cell(options.out, system, fault).results))


def _wanted(options: argparse.Namespace, system: str) -> int:
    return options.requests if SYSTEMS[system].is_ours else options.others


async def _measure(
    options: argparse.Namespace,
    name: str,
    fault_name: str,
    pair: Pair,
    prompts: Sequence[str],
    references: Sequence[Reference],
) -> bool:
    """Fill one cell. False if a fresh pair has to go on: it answers no more, or something was left."""
    fault = FAULTS[fault_name]
    while missing := _missing(options, name, fault_name):
        cell = read_cell(options.out, name, fault_name)
        first, size = len(cell.results), min(fault.size, missing)
        numbers = [number % len(prompts) for number in range(first, first + size)]
        began, moved = time.monotonic(), await pair.moved()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as http:
            results = await fault.inflict(pair, Asker(pair.url, http, prompts, references), numbers)
        left = await pair.left()
        moved = await pair.moved() - moved
        recovered = await pair.recovers()
        date = datetime.date.today().isoformat()
        line = {"date": date, "results": results, "left": left, "moved": moved, "recovered": recovered}
        with cell_file(options.out, name, fault_name).open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        counts = {
            each.value: count for each in Outcome if (count := sum(one.outcome is each for one in results))
        }
        print(
            f"{time.strftime('%H:%M:%S')} {name}, {fault_name}: {first + size} of {_wanted(options, name)}, "
            f"{time.monotonic() - began:.0f} s, {counts}, moved {moved}, left {left}"
            + ("" if recovered else ", started anew"),
            flush=True,
        )
        write_page(options.out)
        if left or not recovered:
            return False
    return True


async def _references(options: argparse.Namespace, prompts: Sequence[str]) -> list[Reference]:
    """Of one plain vLLM server, kept in a file."""
    path = options.out / "plain.json"
    if not path.exists():
        async with vllm_server("plain", None, options.logs, max_running=MAX_RUNNING) as server:
            path.write_text(json.dumps(await ask_plain(server.url, prompts)) + "\n")
    return [Reference(*each) for each in json.loads(path.read_text())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.wrong", description=__doc__)
    installed = [name for name, system in SYSTEMS.items() if system.is_installed]
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=installed)
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--requests", type=int, default=1000, help="of each cell of ours")
    parser.add_argument("--others", type=int, default=200, help="of each other cell")
    parser.add_argument("--seed", type=int, default=38, help="of the moments at which faults come")
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / f"{today}-wrong")
    parser.add_argument("--logs", type=Path, default=Path("logs/bench-wrong"))
    return parser


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_parser().parse_args())))
