# SPDX-License-Identifier: Apache-2.0
"""`kvferry doctor`: report which KV transfer backends work on this machine, and why others do not."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from kvferry.transfer.engine import BACKENDS, usable


def main(argv: list[str]) -> int:
    """Print one line per backend, best first. Returns 0 if at least one is usable."""
    argparse.ArgumentParser(
        prog="kvferry doctor",
        description="Report which KV transfer backends work here, and why others do not.",
    ).parse_args(argv)
    table = Table("backend", "usable", "why")
    verdicts = [usable(name) for name in BACKENDS]
    for name, verdict in zip(BACKENDS, verdicts, strict=True):
        table.add_row(name, "yes" if verdict.ok else "no", verdict.reason)
    Console().print(table)
    return 0 if any(verdict.ok for verdict in verdicts) else 1
