# SPDX-License-Identifier: Apache-2.0
"""Figures that benchmarks make of what they saw."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.pd.load import ANSWER, LONG, SHORT, Seen, offer
from benchmarks.pd.report import write_report
from benchmarks.pd.timeline import STAGES, timeline
from tests.standins.token_stream import token_stream

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


async def test_load_for_pairs_is_prompts_of_token_ids_at_a_rate() -> None:
    began = time.perf_counter()
    async with token_stream() as server:
        seen = await offer(server.url, rate=100.0, seconds=0.3, vocabulary=1000)
    assert 10 < len(seen) < 60
    assert {one.prompt_tokens for one in seen} == {LONG, SHORT}
    assert not any(one.error for one in seen)
    assert {len(one.times) for one in seen} == {ANSWER}
    assert [one.sent for one in seen] == sorted(one.sent for one in seen)
    assert all(began < one.sent < one.times[0] <= one.times[-1] < time.perf_counter() for one in seen)
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == len(seen)
    assert all(3 <= token < 1000 for prompt in prompts for token in prompt)


def test_stages_are_of_hand_overs_that_began_with_the_prefills_token(tmp_path: Path) -> None:
    """Others are left out and counted, whatever else their servers noted."""
    marks = [name for name in STAGES if name != "token"]
    noted = [
        {"transfer_id": f"t{number}", **{name: number + (at + 1) / 1e3 for at, name in enumerate(marks)}}
        for number in range(3)
    ]
    path = tmp_path / "timeline.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in noted))
    early = Seen("r0", LONG, 0.0, [0.0, 0.010])
    late = Seen("r1", LONG, 0.0, [1.010, 1.020])
    cut_off = Seen("r2", LONG, 0.0, [2.0], error="gone")
    together = Seen("r3", LONG, 0.0, [0.0, 0.010])
    logged = [{"request_id": f"r{number}", "transfer_ids": [f"t{number}"]} for number in range(3)]
    found = timeline(path, [early, late, cut_off, together], logged)
    stages = found.pop("stages")
    assert found == {"requests": 4, "failed": 1, "no_transfer": 1, "no_early_token": 1}
    assert {name: each["p50"] for name, each in stages["long"].items()} == {
        **dict.fromkeys(marks, 1.0),
        "token": 2.0,
        "all": 10.0,
    }


def test_the_page_of_a_run_has_the_decode_steps_of_its_raw_figures(tmp_path: Path) -> None:
    """Those of 2026-11-25: beside requests, and alone before and after."""
    write_report(tmp_path, json.loads((RESULTS / "2026-11-25-h200" / "decode.json").read_text()))
    page = (tmp_path / "README.md").read_text()
    assert "| uni, batch 16, pulls | 6.013 / 6.644, 6.85 / 7.649 | 6.495 / 15.03 | 1.0% | 20 | 4.83 |" in page
    assert page.count("| mp, batch 64, ") == 3
