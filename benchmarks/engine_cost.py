# SPDX-License-Identifier: Apache-2.0
"""What our transfer plane costs an engine's server: one with it beside one without, in one run, on CPUs.

`make bench-vllm`, `make bench-sglang`. All serve all the time and are alike but for the plane, which
announces its server to a proxy. They are measured at the same time while they are idle, and in turn while
they decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from benchmarks.proxy_cost import cpu_s
from kvferry.deploy.launcher import start_process
from tests.helpers.client import heldout
from tests.helpers.commands import PROXY
from tests.helpers.metrics import is_shown, scrape, total
from tests.system.sglang.servers import NOWHERE, sglang_server
from tests.system.vllm.servers import MODEL, vllm_server

BATCH = 16
ANSWER = 400
"""Tokens of each answer."""
ROUNDS = 9
IDLE_S = 10.0
SGLANG_WORDS = ("--enable-metrics", "--max-running-requests", str(BATCH), "--max-total-tokens", "16384")
TIMEOUT = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True, slots=True)
class Measured:
    """A server that is measured."""

    url: str
    pid: int
    step: str
    """Its histogram of the time from one token to the next."""
    needs_room: bool = False
    """Of a decode server: it is told that the KV of its prompts goes nowhere, so any is there at once."""


@dataclass(slots=True)
class Cost:
    """One sample a round."""

    idle_cores: list[float] = field(default_factory=list)
    """CPU seconds a second of the whole server, when it has nothing to do."""
    step_s: list[float] = field(default_factory=list)
    """From one token to the next, by the engine's own histogram."""
    step_cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of the whole server for each."""


async def measure(engine: str, rounds: int, log_dir: Path) -> dict[str, Cost]:
    """Start the servers and a proxy, and measure them."""
    async with AsyncExitStack() as stack:
        proxy = await start_process("proxy", PROXY, log_dir)
        stack.push_async_callback(proxy.stop)
        start = start_vllm if engine == "vllm" else start_sglang
        servers = await start(stack, f"127.0.0.1:{proxy.listening['discovery_port']}", log_dir)
        costs = {name: Cost() for name in servers}
        async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
            for server in servers.values():
                await decode(http, server, Cost())  # warms it up
            for number in range(rounds):
                await idle(servers, costs)
                for name, server in sorted(servers.items(), reverse=bool(number % 2)):
                    await decode(http, server, costs[name])
                print(f"round {number + 1} of {rounds}", file=sys.stderr)
        return costs


async def start_vllm(stack: AsyncExitStack, discovery: str, log_dir: Path) -> dict[str, Measured]:
    plain = vllm_server("plain", None, log_dir, max_running=BATCH, prefix_cache=True)
    ours = vllm_server("connector", "kv_both", log_dir, max_running=BATCH, proxy=discovery)
    servers = {
        "plain": await stack.enter_async_context(plain),
        "kvferry": await stack.enter_async_context(ours),
    }
    step = "vllm:inter_token_latency_seconds"
    return {name: Measured(server.url, server.pid, step) for name, server in servers.items()}


async def start_sglang(stack: AsyncExitStack, discovery: str, log_dir: Path) -> dict[str, Measured]:
    """Also a decode server that transfers nothing: one with our plane differs from it by the plane alone."""
    found = {}
    for name, backend in (("plain", None), ("fake", "fake"), ("kvferry", "kvferry")):
        server = await stack.enter_async_context(
            sglang_server(
                name,
                backend and "decode",
                log_dir,
                backend=backend or "",
                proxy=discovery,
                words=SGLANG_WORDS,
            )
        )
        found[name] = Measured(
            server.url, server.pid, "sglang:inter_token_latency_seconds", needs_room=backend is not None
        )
    return found


async def idle(servers: dict[str, Measured], costs: dict[str, Cost]) -> None:
    """Add a sample of what the servers take while they have nothing to do."""
    await asyncio.sleep(1.0)
    before = {name: cpu_s(server.pid) for name, server in servers.items()}
    await asyncio.sleep(IDLE_S)
    for name, server in servers.items():
        costs[name].idle_cores.append((cpu_s(server.pid) - before[name]) / IDLE_S)


async def decode(http: aiohttp.ClientSession, server: Measured, cost: Cost) -> None:
    """Add a sample of what a step of `BATCH` sequences takes."""

    async def ask(prompt: str) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
        if server.needs_room:
            body |= {"bootstrap_host": NOWHERE, "bootstrap_room": secrets.randbits(62)}
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            assert (await response.json())["usage"]["completion_tokens"] == ANSWER

    async def steps() -> tuple[float, float]:
        samples = await scrape(server.url)
        if not is_shown(samples, f"{server.step}_sum"):
            return 0.0, 0.0
        return total(samples, f"{server.step}_sum"), total(samples, f"{server.step}_count")

    spent, before = cpu_s(server.pid), await steps()
    await asyncio.gather(*(ask(prompt.prompt) for prompt in heldout(2 * BATCH)[:BATCH]))
    after = await steps()
    cost.step_s.append((after[0] - before[0]) / (after[1] - before[1]))
    cost.step_cpu_s.append((cpu_s(server.pid) - spent) / ANSWER)


def table(costs: dict[str, Cost]) -> str:
    """Medians, and of the ratios of each round, in Markdown."""
    lines = []
    ours = costs["kvferry"]
    for name, plain in costs.items():
        if plain is ours:
            continue
        rows = [
            ("idle: cores", plain.idle_cores, ours.idle_cores, 1.0),
            (f"decode step of {BATCH}: ms", plain.step_s, ours.step_s, 1e3),
            ("the same: CPU ms", plain.step_cpu_s, ours.step_cpu_s, 1e3),
        ]
        lines += [f"| | {name} | kvferry | ratio (lowest to highest) |", "|---|---|---|---|"]
        for what, one, other, unit in rows:
            ratios = sorted(b / a for a, b in zip(one, other, strict=True))
            lines.append(
                f"| {what} | {statistics.median(one) * unit:.4f} | {statistics.median(other) * unit:.4f} "
                f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.engine_cost", description=__doc__)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="file for all samples")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as log_dir:
        costs = asyncio.run(measure(options.engine, options.rounds, Path(log_dir)))
    print(f"{options.rounds} rounds; load average {psutil.getloadavg()[0]:.1f}\n\n{table(costs)}")
    if options.json is not None:
        samples = {
            name: {key: getattr(cost, key) for key in ("idle_cores", "step_s", "step_cpu_s")}
            for name, cost in costs.items()
        }
        options.json.write_text(json.dumps(samples, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
