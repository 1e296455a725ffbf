# SPDX-License-Identifier: Apache-2.0
"""Servers take turns, and each gets as much at a time as the level says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.deploy.bench.client import BenchFailed
from kvferry.deploy.bench.config import BenchConfig
from kvferry.deploy.bench.measurement import measure
from tests.standins.token_stream import token_stream


async def test_servers_take_turns() -> None:
    lines: list[str] = []
    async with token_stream() as one, token_stream() as two:
        config = BenchConfig(
            server=(f"one={one.url}", f"two={two.url}/v1/"), concurrency="1,3", requests=8, rounds=2,
            output_tokens="4", warmup=1, prompt_tokens="35",
        )  # fmt: skip
        result = await measure(config, lines.append)
    turns = [found.groups() for line in lines if (found := re.match(r"(\d) in flight, .*: (\w+)$", line))]
    assert turns == [
        *(("1", "one"), ("1", "two"), ("1", "two"), ("1", "one")),
        *(("3", "one"), ("3", "two"), ("3", "two"), ("3", "one")),
    ]
    for level in result.levels:
        for name, rounds in level.rounds.items():
            assert [len(each.observations) for each in rounds] == [4, 4]
            for seen in (seen for each in rounds for seen in each.observations):
                assert (name, seen.failure, seen.prompt_tokens, seen.output_tokens) == (name, "", 35, 4)
    # One server counts tokens; both are warmed up and get two levels of eight requests.
    assert (len(one.bodies), len(two.bodies)) == (2 + 1 + 16, 1 + 16)
    assert (one.most_at_once, two.most_at_once) == (3, 3)


async def test_requests_of_a_rate_are_sent_when_they_are_due() -> None:
    async with token_stream() as server:
        config = BenchConfig(server=(server.url,), rate="200", requests=20, rounds=1, output_tokens="2")
        result = await measure(config, lambda line: None)
    [[only]] = result.levels[0].rounds.values()
    due = [each.due_s for each in only.observations]
    assert all(each.sent_s >= each.due_s > 0 for each in only.observations)
    assert only.seconds >= max(due)


async def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    sizes = [{"timestamp": 40 * at, "input_length": 35, "output_length": 1 + at} for at in range(6)]
    path.write_text("\n".join(map(json.dumps, sizes)))
    async with token_stream() as server:
        config = BenchConfig(server=(server.url,), trace=path, speed="2,4", requests=6, rounds=1)
        result = await measure(config, lambda line: None)
        with pytest.raises(BenchFailed, match="has 6 requests, fewer than --requests 7"):
            await measure(replace(config, requests=7), lambda line: None)
    for level in result.levels:
        [[only]] = level.rounds.values()
        seen = sorted(only.observations, key=lambda each: each.due_s)
        due = [at * 0.04 / level.level.value for at in range(6)]
        assert [each.due_s for each in seen] == pytest.approx(due)
        assert [each.output_tokens for each in seen] == [1, 2, 3, 4, 5, 6]


async def test_a_server_that_fails_before_the_measurement_ends_it() -> None:
    async with token_stream() as server:
        config = BenchConfig(server=(server.url, "dead=http://127.0.0.1:9"), model="m")
        with pytest.raises(BenchFailed, match="a request before the measurement failed: Connection refused"):
            await measure(config, lambda line: None)
