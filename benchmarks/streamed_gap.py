# SPDX-License-Identifier: Apache-2.0
"""The gap between a prefill's end and the decode's first step, with KV pulled meanwhile and without.

`make bench-streamed`: on a machine with two NVIDIA GPUs the shape of Qwen3-8B with random weights, prefill on
one GPU and decode on the other; elsewhere a small model on the CPU, which shows that the script works. How it
is measured is in `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec, RunLog
from tests.helpers.gpu import count_gpus, gpu_names

TARGET = 0.25
ANSWER_TOKENS = 4
LOG_LINES = 30
REQUEST_TIMEOUT_S = 60.0
LOG_TIMEOUT_S = 5.0

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is run: the model's shape, and how its agents are started."""

    name: str
    model: Mapping[str, Any]
    dtype: str
    tokens: int
    chunk: int
    requests: int
    devices: tuple[str, str]
    """Of the prefill and of the decode agent."""


GPU = Setup(
    name="Qwen3-8B shape, dummy weights",
    model={
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    dtype="bfloat16",
    tokens=8192,
    chunk=1024,
    requests=5,
    devices=("cuda:0", "cuda:1"),
)  # fmt: skip
CPU = Setup(
    name="small model on the CPU, dummy weights",
    model={
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 936, "max_position_embeddings": 4096,
    },
    dtype="float32",
    tokens=2048,
    chunk=128,
    requests=3,
    devices=("cpu", "cpu"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One request, in seconds. `gap_s` is by the agents' clock, `seen_s` by the client's."""

    streamed: bool
    gap_s: float
    seen_s: float
    prefill_s: float
    pull_tail_s: float
    first_step_s: float
    bytes: int
    early_blocks: int
    backend: str


class NotMeasured(RuntimeError):
    """A request did not go the way that was to be measured."""


async def measure(cluster: Cluster, setup: Setup, number: int, *, streamed: bool) -> Measured:
    """Send one prompt that nobody has seen; its length decides which way it goes."""
    draw = random.Random(number)
    length = setup.tokens if streamed else setup.tokens - 1
    request_id = f"gap-{number}"
    body = {
        "model": "bench",
        "prompt": [draw.randrange(1, 900) for _ in range(length)],
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "seed": number,
        "stream": True,
        "return_token_ids": True,
        "kvferry_timing": True,
    }
    times: list[float] = []
    timing: dict[str, Any] = {}
    limit = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=limit) as http,
        http.post(f"{cluster.url}/v1/completions", json=body, headers={"X-Request-Id": request_id}) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise NotMeasured(str(event["error"]))
                timing = event.get("kvferry_timing", timing)
    prefill = await logged(cluster.agents["prefill"].log, request_id)
    if not timing or timing["recomputed"] or (timing["pull_early_blocks"] > 0) != streamed:
        raise NotMeasured(f"streamed={streamed}, but {timing}")
    return Measured(
        streamed=streamed,
        gap_s=timing["first_step_at"] - prefill["prompt_done_at"],
        seen_s=times[1] - times[0],
        prefill_s=prefill["phases"]["prefill"],
        pull_tail_s=timing["pull_tail_s"],
        first_step_s=timing["first_step_s"],
        bytes=timing["pull_bytes"],
        early_blocks=timing["pull_early_blocks"],
        backend=timing["backend"],
    )


async def logged(log: RunLog, request_id: str) -> dict[str, Any]:
    """The line that an agent logs about a request once it is over."""
    async with asyncio.timeout(LOG_TIMEOUT_S):
        while True:
            for line in log.tail(1000).splitlines():
                if f'"request_id":"{request_id}"' in line:
                    return json.loads(line[line.index("{") :])
            await asyncio.sleep(0.05)


def cluster_spec(setup: Setup, transfer: str, directory: Path) -> ClusterSpec:
    """A pair of agents; prompts of all tokens are streamed, those of one less are not."""
    model = directory / "bench"
    model.mkdir()
    context = setup.tokens + 64
    config = {**QWEN3, **setup.model, "dtype": setup.dtype, "eos_token_id": 0}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODELS / "ferry-tiny" / name, model / name)
    args = (
        "--load-format", "dummy", "--dtype", setup.dtype, "--max-model-len", str(context),
        "--kv-blocks", str(3 * -(-context // 16)), "--prefill-chunk", str(setup.chunk),
        "--max-batch-tokens", str(max(1024, setup.chunk)), "--prefix-cache", "false", "--threads", "1",
        "--transfer", transfer,
    )  # fmt: skip
    prefill, decode = setup.devices
    return ClusterSpec(
        model=str(model),
        agents=(
            AgentSpec(name="prefill", role="prefill", args=(*args, "--device", prefill)),
            AgentSpec(name="decode", role="decode", args=(*args, "--device", decode)),
        ),
        log_dir=directory / "logs",
        proxy_args=("--stream-pull-min-tokens", str(setup.tokens)),
    )


async def run(
    setup: Setup, transfer: str, directory: Path, deadline_s: float, console: Console
) -> list[Measured]:
    """All requests, in turn with and without; the first of each kind is for warming up and not kept."""
    began = time.monotonic()

    def say(words: str) -> None:
        console.print(f"[{time.monotonic() - began:5.1f} s] {words}", highlight=False, markup=False)

    kept = []
    async with asyncio.timeout(deadline_s), Cluster(cluster_spec(setup, transfer, directory)) as cluster:
        await cluster.wait_ready(deadline_s)
        for number in range(2 * (setup.requests + 1)):
            measured = await measure(cluster, setup, number, streamed=bool(number % 2))
            way = "streamed" if measured.streamed else "plain"
            say(f"{way}: gap {measured.gap_s * 1e3:.1f} ms, prefill {measured.prefill_s * 1e3:.0f} ms")
            if number >= 2:
                kept.append(measured)
    return kept


def ratio(measured: list[Measured]) -> float:
    """Median gap with streaming over median gap without."""
    gaps = {way: [each.gap_s for each in measured if each.streamed is way] for way in (True, False)}
    return statistics.median(gaps[True]) / statistics.median(gaps[False])


def show(setup: Setup, measured: list[Measured], console: Console) -> None:
    """Print medians of both ways, and their ratio."""
    table = Table(title=f"{setup.name}: {setup.tokens} tokens in chunks of {setup.chunk}")
    columns = (
        "KV pulled",
        "gap ms",
        "(min–max)",
        "client's wait ms",
        "pull's tail ms",
        "prefill ms",
        "MB",
        "by",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("KV pulled", "by") else "right")
    for way, name in ((False, "after the prefill"), (True, "meanwhile")):
        rows = [each for each in measured if each.streamed is way]
        gaps = [each.gap_s * 1e3 for each in rows]
        table.add_row(
            name,
            f"{statistics.median(gaps):.1f}",
            f"{min(gaps):.1f}–{max(gaps):.1f}",
            f"{statistics.median(each.seen_s for each in rows) * 1e3:.1f}",
            f"{statistics.median(each.pull_tail_s for each in rows) * 1e3:.1f}",
            f"{statistics.median(each.prefill_s for each in rows) * 1e3:.0f}",
            f"{rows[0].bytes / 1e6:.0f}",
            rows[0].backend,
        )
    console.print(table)
    console.print(f"gap, streamed ÷ not: {ratio(measured):.3f} (wanted: under {TARGET})", highlight=False)


def report(setup: Setup, measured: list[Measured]) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "what": setup.name,
        "tokens": setup.tokens,
        "chunk": setup.chunk,
        "machine": {"cpu": platform.processor() or platform.machine(), "gpus": gpu_names()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "gap_ratio": ratio(measured),
        "requests": [asdict(each) for each in measured],
    }


def dump_logs(directory: Path, console: Console) -> None:
    for log in sorted((directory / "logs").glob("*.log")):
        console.rule(log.name)
        console.print("\n".join(log.read_text().splitlines()[-LOG_LINES:]), highlight=False, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--transfer", default="auto", help="backend that moves the KV")
    parser.add_argument("--deadline-s", type=float, default=180.0, help="for everything together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    console = Console(width=120)
    on_gpus = count_gpus() >= 2 if options.device == "auto" else options.device == "cuda"
    setup = GPU if on_gpus else CPU
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            measured = asyncio.run(run(setup, options.transfer, directory, options.deadline_s, console))
        except Exception:
            dump_logs(directory, console)
            raise
    show(setup, measured, console)
    if options.json is not None:
        options.json.write_text(json.dumps(report(setup, measured), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
