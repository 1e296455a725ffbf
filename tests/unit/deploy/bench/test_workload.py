# SPDX-License-Identifier: Apache-2.0
"""The same load for every server, of prompts that have the tokens that were asked for."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvferry.deploy.bench.arrivals import SizedArrival
from kvferry.deploy.bench.config import BenchConfig, Lengths, Level
from kvferry.deploy.bench.workload import TokensPerWord, Workload, measure_tokens, round_size

TOKENS = TokensPerWord(5, 3)
RATE = Level("rate", 4.0)


def test_all_servers_get_the_same_lengths_and_times_and_other_words() -> None:
    config = BenchConfig(requests=40, rounds=2, prompt_tokens="50:500", output_tokens="8,64")
    workload = Workload(config, TOKENS, "run")
    first, again, second, other_round = (
        list(workload.requests(RATE, round_number, server))
        for round_number, server in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    other_run = list(Workload(config, TOKENS, "other").requests(RATE, 0, 0))
    assert first == again
    assert [each.due_s for each in first] == [each.due_s for each in second]
    assert [each.output_tokens for each in first] == [each.output_tokens for each in second]
    assert [len(each.prompt.split()) for each in first] == [len(each.prompt.split()) for each in second]
    prompts = [each.prompt for each in (*first, *second, *other_round, *other_run)]
    assert len(set(prompts)) == 4 * 20
    assert [each.due_s for each in first] == [each.due_s for each in other_run]
    assert {each.output_tokens for each in first} == {8, 64}


def test_another_seed_is_another_load() -> None:
    one, two = (list(Workload(BenchConfig(seed=seed), TOKENS, "run").requests(RATE, 0, 0)) for seed in (1, 2))
    assert not {each.due_s for each in one} & {each.due_s for each in two}


def test_requests_arrive_at_the_rate() -> None:
    """Exponential gaps: their mean and their standard deviation are both 1 / rate."""
    planned = list(Workload(BenchConfig(requests=4000, rounds=1), TOKENS, "run").requests(RATE, 0, 0))
    gaps = [late.due_s - early.due_s for early, late in pairwise(planned)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_with_a_concurrency_nothing_waits_for_its_time() -> None:
    requests = Workload(BenchConfig(), TOKENS, "run").requests(Level("concurrency", 4), 0, 0)
    assert {each.due_s for each in requests} == {0.0}


def test_a_trace_is_replayed_part_by_part_at_its_speed() -> None:
    trace = [SizedArrival(10.0 + 2 * number, 50 + 3 * number, 1 + number) for number in range(5)]
    config = BenchConfig(requests=5, rounds=2, trace=Path(__file__))
    workload = Workload(config, TOKENS, "run", trace)
    rounds = [list(workload.requests(Level("speed", 4.0), number, 0)) for number in range(2)]
    assert [[each.due_s for each in part] for part in rounds] == [[0.0, 0.5, 1.0], [0.0, 0.5]]
    assert [each.output_tokens for part in rounds for each in part] == [1, 2, 3, 4, 5]
    assert [len(each.prompt.split()) for part in rounds for each in part] == [15, 16, 17, 18, 19]
    [*_, warmup] = workload.warmup(0)
    assert (len(warmup.prompt.split()), warmup.output_tokens) == (19, 5)
    odd = Workload(config, TOKENS, "run", [SizedArrival(0.0, 62, 1), SizedArrival(1.0, 50, 30)])
    assert [len(each.prompt.split()) for each in odd.warmup(0)] == [15, 15], "no request of both lengths"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speed": "2"}, "speed needs --trace"),
        ({"trace": Path(__file__), "rate": "1"}, "exclude each other"),
        ({"trace": Path(__file__), "speed": "0"}, "speed must be numbers greater than 0"),
        ({"trace": Path("nowhere")}, "trace"),
    ],
)
def test_options_of_a_trace(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BenchConfig(**options)


def test_the_rounds_have_all_requests() -> None:
    config = BenchConfig(requests=11, rounds=3)
    assert [round_size(config, number) for number in range(3)] == [4, 4, 3]
    assert BenchConfig(requests=1).num_rounds == 1 and round_size(BenchConfig(requests=1), 0) == 1


@pytest.mark.parametrize("longest", [16, 100, 8000])
async def test_prompts_have_the_tokens_that_were_asked_for(longest: int) -> None:
    async def count(prompt: str) -> int:
        return 7 + sum(len(word) for word in prompt.split())  # a tokenizer of letters, with a template

    tokens = await measure_tokens(count, longest)
    config = BenchConfig(requests=200, rounds=1, prompt_tokens=str(longest))
    lengths = [await count(each.prompt) for each in Workload(config, tokens, "run").requests(RATE, 0, 0)]
    # Words have 5 to 7 letters: their number is right, and their sum varies.
    assert statistics.mean(lengths) == pytest.approx(longest, abs=3.5, rel=0.02)


@pytest.mark.parametrize("most", [0, 7, 512], ids=["counts nothing", "always the same", "cuts prompts off"])
async def test_a_server_whose_counts_do_not_grow_with_prompts_is_not_gone_by(most: int) -> None:
    """It was sent a thousand words for each token that was asked for."""
    asked = []

    async def count(prompt: str) -> int:
        asked.append(len(prompt.split()))
        return min(most, 7 + asked[-1])

    with pytest.raises(ValueError, match="is said to have"):
        await measure_tokens(count, 8000)
    assert max(asked) <= 8000


async def test_a_prompt_is_never_empty() -> None:
    assert TokensPerWord(50, 1).num_words(8) == 1


def test_the_warmup_has_the_longest_prompts_and_answers() -> None:
    config = BenchConfig(warmup=2, prompt_tokens="20,65", output_tokens="4:9")
    workload = Workload(config, TOKENS, "run")
    warmup = workload.warmup(0)
    assert [(len(each.prompt.split()), each.output_tokens) for each in warmup] == [(20, 9), (20, 9)]
    assert warmup != workload.warmup(1)


@pytest.mark.parametrize("words", ["", "0", "7:3", "1:2:3", "8,", "a", "-4", "1.5"])
def test_lengths_that_are_none(words: str) -> None:
    with pytest.raises(ValueError, match=r"^prompt_tokens must be N, LOW:HIGH or several"):
        Lengths.parse("prompt_tokens", words)
