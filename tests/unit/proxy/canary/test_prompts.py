# SPDX-License-Identifier: Apache-2.0
"""What the canary sends."""

from __future__ import annotations

from random import Random

import pytest

from kvferry.proxy.canary.prompts import LEAST_TOKENS, LONG_EVERY, MAX_PROMPT_TOKENS, Prompts

PAIR = "pair"
CHUNK = 256


@pytest.mark.parametrize("chars_per_token", [1, 4])
def test_lengths_cover_a_chunk_and_one_in_eight_exceeds_it(chars_per_token: int) -> None:
    prompts, lengths = Prompts(Random(1)), []
    for _ in range(400):
        prompt, _ = prompts.make(PAIR, CHUNK, 4096, 16)
        tokens = -(-len(prompt) // chars_per_token)
        prompts.learn(prompt, tokens)
        lengths.append(tokens)
    later = lengths[80:]
    assert sum(each > CHUNK for each in later) == pytest.approx(len(later) / LONG_EVERY, rel=0.15)
    assert {each // 16 for each in later} >= set(range(CHUNK // 16)), "every number of blocks"
    assert max(later) <= 1.3 * CHUNK and min(later) >= LEAST_TOKENS - 1


def test_prompts_fit_the_context() -> None:
    prompts = Prompts(Random(2))
    assert all(len(prompts.make(PAIR, CHUNK, 64, 16)[0]) + 16 <= 64 for _ in range(50))
    assert all(len(prompts.make(PAIR, 10**9, 0, 16)[0]) <= MAX_PROMPT_TOKENS for _ in range(50))
    assert all(prompts.make(PAIR, None, 17, 16)[0] for _ in range(50)), "never an empty one"


def test_some_prompts_begin_as_earlier_ones_did_with_their_salt() -> None:
    prompts = Prompts(Random(3))
    made = [prompts.make(PAIR, CHUNK, 4096, 16) for _ in range(300)]
    salts = [salt for _, salt in made]
    assert 60 <= len(salts) - len(set(salts)) <= 120
    texts: dict[str, str] = {}
    for prompt, salt in made:
        if salt in texts and min(len(prompt), len(texts[salt])) > 0:
            break
        texts[salt] = prompt
    else:
        pytest.fail("no prompt shares a salt with an earlier one")


def test_no_two_pairs_get_the_same_salt() -> None:
    """The decode server's cache may hold wrong KV of the other pair under it."""
    prompts = Prompts(Random(4))
    made = [(pair, prompts.make(pair, CHUNK, 4096, 16)[1]) for _ in range(200) for pair in ("one", "other")]
    salts = {pair: [salt for of, salt in made if of == pair] for pair in ("one", "other")}
    assert not set(salts["one"]) & set(salts["other"])
    assert all(len(set(each)) < 150 for each in salts.values()), "one in three has an earlier one's"
