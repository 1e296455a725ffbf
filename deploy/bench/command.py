# SPDX-License-Identifier: Apache-2.0
"""`kvferry bench` from its command line to its exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

import uvloop
from rich.console import Console

from kvferry.common.exceptions import message_of
from kvferry.common.http.server import raise_file_limit
from kvferry.common.http.tls import BadCertificate
from kvferry.common.options import exit_with
from kvferry.common.telemetry.version import VERSION
from kvferry.deploy.bench.client import BenchFailed
from kvferry.deploy.bench.config import PROG, BenchConfig, parse_config
from kvferry.deploy.bench.measurement import BenchResult, measure
from kvferry.deploy.bench.report import answered, as_json, tables

PIPED_COLUMNS = 160
"""How wide the tables may be where no terminal sets it."""
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Measure. Returns 0, or 1 if a server cannot be measured or answers none of the requests of a level."""
    config = parse_config(argv)
    if config.plot is not None and find_spec("matplotlib") is None:
        exit_with(PROG, "--plot needs the extra bench: in a clone of kvferry, pip install '.[bench]'")
    raise_file_limit()
    try:
        result = _measure(config)
        write(config, result)
    except (BenchFailed, BadCertificate, OSError) as error:
        print(f"{PROG}: {message_of(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if answered_everywhere(result) else 1


def _measure(config: BenchConfig) -> BenchResult:
    console = Console(stderr=True)
    with console.status("connects", spinner="line") as status:
        return uvloop.run(measure(config, status.update))


def write(config: BenchConfig, result: BenchResult) -> None:
    """Print the tables, and write the files that are wanted. Raises OSError."""
    screen = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    screen.print(tables(config, result), highlight=False, markup=False)
    if config.json is not None:
        config.json.write_bytes(as_json(config, result, VERSION))
    if config.plot is not None:
        from kvferry.deploy.bench.plot import write_plot  # matplotlib is an extra

        write_plot(result, config.objectives, config.plot)


def answered_everywhere(result: BenchResult) -> bool:
    return all(answered(rounds) for level in result.levels for rounds in level.rounds.values())
