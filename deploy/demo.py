# SPDX-License-Identifier: Apache-2.0
"""`make demo`: start a small cluster, stream three prompts through it, and show what each one cost.

Exit non-zero, with the reason, if a process fails, an answer is wrong, or no KV was transferred.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from kvferry.deploy.launcher import Cluster, LaunchError
from kvferry.deploy.up import PartOptions, UpConfig, cluster_spec

REQUEST_TIMEOUT_S = 60.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class DemoFailed(RuntimeError):
    """The cluster ran, but an answer was wrong, or the KV was not transferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt, a short form of it to print, and the answer that the bundled model must give."""

    prompt: str
    shown: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of one request: times in seconds as seen by the client, and by the decode agent."""

    text: str
    ttft: float
    tpot: float
    timing: dict[str, Any]


def questions(seed: int = 7) -> list[Question]:
    """Return a sum, a short recall and a long recall; the last prompt has about 800 tokens."""
    rng = random.Random(seed)
    left, right = rng.randint(100, 899), rng.randint(10, 99)
    made = [Question(prompt=f"{left}+{right}=", shown=f"{left}+{right}=", answer=str(left + right))]
    for pairs in (12, 130):
        keys = rng.sample([a + b for a in LETTERS for b in LETTERS], pairs)
        values = [f"{rng.randrange(1000):03d}" for _ in keys]
        wanted = rng.randrange(pairs)
        listing = "".join(f"{key}={value};" for key, value in zip(keys, values, strict=True))
        shown = f"{listing[:24]}… ({pairs} pairs) ?{keys[wanted]}="
        made.append(Question(prompt=f"{listing}?{keys[wanted]}=", shown=shown, answer=values[wanted]))
    return made


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON events of an OpenAI stream up to `[DONE]`. Raises `DemoFailed` on an error or a cut."""
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise DemoFailed(event["error"]["message"])
        yield event
    raise DemoFailed("the stream ended without [DONE]")


async def stream(session: aiohttp.ClientSession, url: str, question: Question, console: Console) -> Run:
    """Stream one question, printing the answer as it arrives."""
    body = {
        "model": "ferry-tiny",
        "prompt": question.prompt,
        "temperature": 0,
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kvferry_timing": True,
    }
    start = time.monotonic()
    arrivals: list[float] = []
    text, timing, tokens = "", None, 0
    console.print(f"[bold]{question.shown}[/bold] ", end="", highlight=False)
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise DemoFailed(f"HTTP {response.status}: {await response.text()}")
        async for event in events(response):
            timing = event.get("kvferry_timing", timing)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                if choice["text"]:
                    arrivals.append(time.monotonic() - start)
                    text += choice["text"]
                    console.print(choice["text"], end="", highlight=False)
    console.print()
    if text != question.answer:
        raise DemoFailed(f"answered {text!r}, expected {question.answer!r}")
    if not timing or not timing["pull_bytes"] or timing["recomputed"]:
        raise DemoFailed(f"the KV did not move: {timing}")
    tpot = (arrivals[-1] - arrivals[0]) / max(1, tokens - 1)
    return Run(text=text, ttft=arrivals[0], tpot=tpot, timing=timing)


def table(runs: list[Run]) -> Table:
    """Return a table with one row per request."""
    made = Table(title="what each request cost")
    for column in ("answer", "TTFT ms", "TPOT ms", "KV bytes pulled", "backend", "pull ms"):
        made.add_column(column, justify="left" if column in ("answer", "backend") else "right")
    for run in runs:
        made.add_row(
            run.text,
            f"{run.ttft * 1e3:.1f}",
            f"{run.tpot * 1e3:.1f}",
            f"{run.timing['pull_bytes']:,}",
            run.timing["backend"],
            f"{run.timing['pull_s'] * 1e3:.1f}",
        )
    return made


async def demo(console: Console) -> None:
    """Run the demo. Raises `LaunchError` or `DemoFailed` with the reason if anything went wrong."""
    config = UpConfig(port=0, discovery_port=0, log_dir=Path("logs/demo"))
    spec = cluster_spec(config, PartOptions("make demo", ()))
    async with Cluster(spec, partial(print, file=sys.stderr, flush=True)) as cluster:
        await cluster.wait_ready()
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            runs = [await stream(session, cluster.url, question, console) for question in questions()]
        console.print(table(runs))


def main() -> int:
    """Entry point; returns the exit status."""
    console = Console()
    try:
        asyncio.run(demo(console))
    except (LaunchError, DemoFailed, aiohttp.ClientError, TimeoutError) as error:
        console.print(f"[red]demo failed:[/red] {error or type(error).__name__}", highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
