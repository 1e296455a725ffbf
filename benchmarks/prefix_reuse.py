# SPDX-License-Identifier: Apache-2.0
"""The table in docs/prefix-reuse.md: a conversation of 8 turns, and what each computes and moves.

`python -m benchmarks.prefix_reuse --write` runs it and puts the table and the date into the page.
"""

from __future__ import annotations

import asyncio
import datetime
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec
from tests.helpers.client import session
from tests.system.conversation import TURNS, Conversation, Turn

PAGE = Path(__file__).parents[1] / "docs" / "prefix-reuse.md"
BEGIN, END = "<!-- table: make prefix-table -->\n", "<!-- end of table -->\n"
ON, OFF = ("--prefix-pull-min-tokens", "128"), ("--prefix-pull-min-tokens", "0")
RUNS = {
    "`tcp`": ("tcp", ON),
    "`nixl`": ("nixl", ON),
    "`tcp`, pulls of prefixes off": ("tcp", OFF),
}
"""Backends and the proxy's options, by what the page calls them."""


async def converse(transfer: str, proxy_args: tuple[str, ...]) -> list[Turn]:
    """A conversation with two prefill agents, which take its turns alternately, and one decode agent."""
    args = ("--threads", "1", "--transfer", transfer)
    with tempfile.TemporaryDirectory() as logs:
        spec = ClusterSpec(
            model="ferry-tiny",
            agents=(
                AgentSpec(name="prefill-0", role="prefill", args=args),
                AgentSpec(name="prefill-1", role="prefill", args=args),
                AgentSpec(name="decode-0", role="decode", args=args),
            ),
            log_dir=Path(logs),
            proxy_args=proxy_args,
        )
        async with Cluster(spec) as cluster, session() as http:
            await cluster.wait_ready()
            conversation = Conversation(cluster, http)
            return [await conversation.ask() for _ in range(TURNS)]


def lines(runs: dict[str, list[Turn]]) -> Iterator[str]:
    """The table in Markdown, one row for each turn of each run."""
    heads = ["run", "turn", "prompt", "computed", "cached", "prefix pulled", "its KiB"]
    heads += ["decode: cached", "pulled", "its KiB"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for run, turns in runs.items():
        for number, turn in enumerate(turns, 1):
            prefill, decode = turn.prefill, turn.decode
            cells: tuple[object, ...] = (
                *(run, number, len(turn.prompt), prefill["computed"], prefill["cached"]),
                *(prefill["pulled_prefix"], prefill["prefix_bytes"] // 1024),
                *(decode["cached"], decode["pulled"], decode["pulled_bytes"] // 1024),
            )
            yield "| " + " | ".join(map(str, cells)) + " |"


async def main(write: bool) -> None:
    runs = {name: await converse(*settings) for name, settings in RUNS.items()}
    table = "\n".join(lines(runs)) + "\n"
    print(table)
    if write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        page = head + BEGIN + "\n" + table + "\n" + END + rest.partition(END)[2]
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        PAGE.write_text(re.sub(r"Measured on \d{4}-\d\d-\d\d", f"Measured on {today}", page))


if __name__ == "__main__":
    asyncio.run(main(write="--write" in sys.argv[1:]))
