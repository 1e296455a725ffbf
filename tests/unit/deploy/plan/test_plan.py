# SPDX-License-Identifier: Apache-2.0
"""What `kvferry plan` predicts: one request by arithmetic, a load against every split."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from kvferry.deploy.bench.arrivals import SizedArrival, at_rate, read_trace
from kvferry.deploy.plan.command import PlanConfig, load_of, main, outcomes, serve
from kvferry.deploy.plan.simulation import ServerModel

MODEL = ServerModel()


def test_one_request_takes_what_its_steps_take() -> None:
    """A prompt of two chunks, and an answer of which the first token comes with the last chunk."""
    load = [SizedArrival(0.0, 2 * MODEL.chunk, 11)]
    (row,) = [serve("one", PlanConfig(servers=1), load, MODEL, ["both"], None)]
    assert row.ttft_p50_s == pytest.approx(2 * (MODEL.step_s + MODEL.chunk * MODEL.token_s))
    assert row.tpot_p50_ms == pytest.approx(1000 * (MODEL.step_s + MODEL.sequence_s))
    (row,) = [serve("pair", PlanConfig(servers=2), load, MODEL, ["prefill", "decode"], 0)]
    pull_s = MODEL.pull_s + 2 * MODEL.chunk * MODEL.pull_token_s
    assert row.tpot_p50_ms == pytest.approx(1000 * (MODEL.step_s + MODEL.sequence_s + pull_s / 10))


@pytest.mark.timeout(120)
def test_a_choice_for_each_request_is_near_the_best_split_of_a_mix() -> None:
    """Near the highest load that a split serves: the best one is not the same at every load and mix."""
    config = PlanConfig(requests=600, rate=28.0)
    rows = list(outcomes(config, load_of(config), MODEL, 8))
    *fixed, auto = rows
    best = max(fixed, key=lambda row: row.goodput)
    assert auto.goodput >= 0.97 * best.goodput
    assert auto.ttft_p50_s <= 1.1 * best.ttft_p50_s
    assert min(row.goodput for row in fixed) < 0.5, "a wrong split loses"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ten_thousand_requests_over_64_servers() -> None:
    config = PlanConfig(servers=64, rate=248.0)
    row = serve("auto", config, load_of(config), MODEL, ["both"] * 64, None)
    assert row.goodput >= 0.9


def test_traces_are_read_and_played_at_another_rate(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "trace.csv", tmp_path / "trace.jsonl.gz"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,3180,0\n"
    )
    lines = b'{"timestamp": 1000, "input_length": 7, "output_length": 5, "hash_ids": [0]}\n'
    mooncake.write_bytes(gzip.compress(lines))
    assert read_trace(azure) == [SizedArrival(0.0, 4808, 10), SizedArrival(2.0, 3180, 1)]
    assert read_trace(mooncake) == [SizedArrival(0.0, 7, 5)]
    assert at_rate(read_trace(azure), 4.0)[-1].at == pytest.approx(0.5)


def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert main(["--trace", str(other)]) == 1
    assert "no column 'TIMESTAMP'" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--servers", "2", "--requests", "20", "--rate", "2"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["prefill + decode", "together", "1 + 1", "1 + 1, from 512", "auto"]


def test_prompts_share_steps_that_hold_more_than_a_chunk() -> None:
    load, tokens = [SizedArrival(0.0, 2 * MODEL.chunk, 1)] * 2, MODEL.chunk * MODEL.token_s
    shared = msgspec.structs.replace(MODEL, batch_tokens=2 * MODEL.chunk)
    rows = [serve("", PlanConfig(), load, each, ["both"], None) for each in (MODEL, shared)]
    assert rows[0].ttft_p99_s == pytest.approx(4 * (MODEL.step_s + tokens))
    # The first step begins with the first prompt alone.
    assert rows[1].ttft_p99_s == pytest.approx(3 * MODEL.step_s + 4 * tokens)


def test_a_leg_takes_what_it_takes_before_its_first_step() -> None:
    load, model = [SizedArrival(0.0, 100, 11)], msgspec.structs.replace(MODEL, leg_s=0.5)
    (plain, slow) = [serve("", PlanConfig(), load, each, ["prefill", "decode"], 0) for each in (MODEL, model)]
    assert slow.ttft_p50_s - plain.ttft_p50_s == pytest.approx(0.5)
    assert slow.tpot_p50_ms - plain.tpot_p50_ms == pytest.approx(500 / 10)


def test_a_server_that_decodes_for_long_stays_in_rotation() -> None:
    """A proxy takes no request to a server that says for 30 s that it runs and has made no step."""
    model = msgspec.structs.replace(MODEL, step_s=0.05)
    load = [SizedArrival(0.0, 100, 2000), SizedArrival(60.0, 100, 11)]
    row = serve("", PlanConfig(), load, model, ["prefill", "decode"], 0)
    assert row.tpot_p50_ms == pytest.approx(1000 * model.step_s, rel=0.1)
