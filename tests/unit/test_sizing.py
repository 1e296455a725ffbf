# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of docs/deploy/sizing.md is right, and its measured figures are those of the kept runs."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy" / "sizing.md"
RESULTS = ROOT / "benchmarks" / "results"
LOAD = RESULTS / "2026-11-24-2-h200"

TOKEN = 2 * 36 * 8 * 128 * 2
"""Bytes of KV of a token: Qwen3-8B's shape in bfloat16."""
SHORT, LONG, ANSWER = 256, 8192, 256
PREFILL_S = {SHORT: 0.021, LONG: 0.231}
STEP_S = 0.0085
KEPT = 8
"""Requests a second at which one pair kept both objectives."""
RATE = 20
BUSY = 0.8
LEASE_S = 10
EVENT_S, REQUEST_S = 25.7e-6, 0.309e-3
"""CPU seconds of the proxy, a pair: of an event of a stream, and of a request."""


def rows(table: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the page, without its head."""
    _, _, after = PAGE.read_text().partition(f"## {table}\n")
    lines = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def results(heading: str) -> dict[str, str]:
    """Return the third cell of each row by its first one."""
    return {cells[0]: cells[2] for cells in rows(heading)}


def test_bytes_of_a_token() -> None:
    tiny = json.loads((ROOT / "deploy/models/ferry-tiny/config.json").read_text())
    shapes = {
        "`ferry-tiny`, float32": (
            tiny["num_hidden_layers"],
            tiny["num_key_value_heads"],
            tiny["head_dim"],
            4,
        ),
        "Qwen3-8B's shape, bfloat16": (36, 8, 128, 2),
    }
    expected = []
    for name, (layers, heads, size, width) in shapes.items():
        token = 2 * layers * heads * size * width
        block = f"{16 * token / 1e6:.2f} MB"
        expected.append(
            [name, f"2 × {layers} × {heads} × {size} × {width}", f"{token:,}", block, gb(LONG * token)]
        )
    assert rows("KV of a token") == expected


def test_the_example() -> None:
    prompt = (SHORT + LONG) / 2
    prefill_s = sum(PREFILL_S.values()) / 2
    prefills = math.ceil(RATE * prefill_s / BUSY)
    decoding = RATE * (ANSWER - 1) * STEP_S
    each = KEPT * (ANSWER - 1) * STEP_S
    decodes = math.ceil(decoding / (each * BUSY))
    held_s = 0.48
    moved = RATE * prompt * TOKEN
    events = RATE * ANSWER
    cores = events * EVENT_S + RATE * REQUEST_S
    assert results("Example") == {
        "KV of a prompt, mean": gb(prompt * TOKEN),
        "KV of a prompt, longest": gb(LONG * TOKEN),
        "prefill of a prompt, mean": f"{prefill_s:.3f} s",
        "busy prefill agents": f"{RATE * prefill_s:.2f}",
        "**prefill agents**": f"**{prefills}**",
        "sequences in decode": f"{decoding:.1f}",
        "sequences in decode at the highest rate at which one decode agent met the objectives": f"{each:.1f}",
        "**decode agents**": f"**{decodes}**",
        "KV in use at each decode agent, mean": gb(decoding / decodes * (prompt + ANSWER) * TOKEN),
        "the same if all prompts were long": gb(decoding / decodes * (LONG + ANSWER) * TOKEN),
        "KV leased or being computed at each prefill agent, mean": gb(moved / prefills * held_s),
        "additional KV leased if decode agents die": gb(moved / prefills * LEASE_S),
        "KV transferred in total": f"{moved / 1e9:.3g} GB/s",
        "**link of each prefill agent**, mean": f"**{moved / prefills * 8 / 1e9:.3g} Gbit/s**",
        "cores of the proxy": f"{cores:.2f}",
    }
    assert f"({held_s} s)" in PAGE.read_text()


def test_the_link() -> None:
    """One long prompt at nominal speeds; and the speed below which its KV takes longer than its prefill."""
    bits = LONG * TOKEN * 8
    expected = [[f"{speed} Gbit/s", f"{bits / (speed * 1e9):.3f} s"] for speed in (10, 25, 100, 400)]
    assert [row for row in rows("Link") if row[0].endswith("Gbit/s")] == expected
    least = LONG * TOKEN / PREFILL_S[LONG]
    assert f"{least / 1e9:.1f} GB/s ({least * 8 / 1e9:.0f} Gbit/s)" in PAGE.read_text()


def test_what_the_same_arithmetic_says_of_the_measured_rates() -> None:
    said = [cells[:2] for cells in rows("Does the arithmetic hold?")]
    for rate in (6, 8):
        assert [f"{rate} requests/s", f"{rate * sum(PREFILL_S.values()) / 2:.2f}"] in said


def measured(run: str, column: str, tokens: Iterable[int] = (SHORT, LONG)) -> float:
    with gzip.open(LOAD / "requests.csv.gz", "rt") as file:
        return median(
            float(row[column])
            for row in csv.DictReader(file)
            if row["run"] == run and int(row["prompt_tokens"]) in tokens
        )


def test_the_figures_are_those_of_the_runs() -> None:
    for tokens, seconds in PREFILL_S.items():
        assert round(measured("kvferry-cuda_ipc at 2/s", "ttft", [tokens]) / 1e3, 3) == seconds
    assert round(measured("kvferry-cuda_ipc at 8/s", "tpot") / 1e3, 4) == STEP_S
    pair = "kvferry-cuda_ipc at 8/s | 101 | 0 | 0.421 / 1.383 | 56.61 / 82.9 | 8.095 / 19.21 | 1.0 |"
    assert pair in (LOAD / "README.md").read_text()
    proxy = (RESULTS / "2026-11-24-2-core-vm" / "proxy.md").read_text()
    assert f"kvferry sglang | {EVENT_S * 1e6:.1f} |" in proxy
    assert f"kvferry sglang, a pair | {REQUEST_S * 1e3:.3f} |" in proxy
    assert (
        f"cuda_ipc ÷ plain copy, block-major ({364.5} GB/s)"
        in (RESULTS / "2026-11-23-2-h200" / "README.md").read_text()
    )
