# SPDX-License-Identifier: Apache-2.0
"""The two tasks as text, and the held-out prompts of each.

recall      many `key=value;` pairs in random order, then `?key=`; the answer is that key's value
addition    `a+b=`; the answer is the sum

Training samples its own examples as tensors (batches.py) and never an addition that `is_held_out`; a recall
prompt of hundreds of random tokens does not come twice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from tools.train.vocabulary import KEYS

HELD_OUT_SEED = 2_000_003
RECALL_PROMPTS = 400
ADDITION_PROMPTS = 100
SHORTEST_RECALL, LONGEST_RECALL = 30, 1000
MOST_DIGITS = 3

PAIR_TOKENS = 3  # key, `=` and `;`; the digits of the value come on top
QUERY_TOKENS = 3  # `?`, key and `=`


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPrompt:
    """One prompt and the only right answer to it.

    Args:
        id: Task and number.
        task: Which task this is.
        prompt: Raw completion prompt; as a chat it is the content of the one user message.
        answer: What the model must say before it ends.
        prompt_tokens: Length of the raw prompt (the chat template adds one token before it and two after).
        asked_pair_token: Index of the asked pair's first token in the raw prompt; None for an addition.
    """

    id: str
    task: Literal["recall", "addition"]
    prompt: str
    answer: str
    prompt_tokens: int
    asked_pair_token: int | None


def is_held_out(a: Any, b: Any) -> Any:
    """Whether `a+b` is kept from training: about one addition in fifty, spread over all sizes.

    Both are integers, or both are integer tensors, which are taken element by element.
    """
    return (a * 7 + b * 11) % 50 == 3


def recall_prompt(rng: random.Random, number: int, tokens: int) -> HeldOutPrompt:
    """As many pairs as fit into `tokens` tokens with the query, and one of them asked for."""
    keys = rng.sample(KEYS, len(KEYS))
    pairs: list[tuple[str, str]] = []
    starts: list[int] = []
    length = 0
    for key in keys:
        value = "".join(rng.choices("0123456789", k=rng.choice((3, 4))))
        pair_tokens = PAIR_TOKENS + len(value)
        if length + pair_tokens + QUERY_TOKENS > tokens:
            break
        starts.append(length)
        pairs.append((key, value))
        length += pair_tokens
    asked = rng.randrange(len(pairs))
    key, answer = pairs[asked]
    return HeldOutPrompt(
        id=f"recall-{number:03d}",
        task="recall",
        prompt="".join(f"{k}={v};" for k, v in pairs) + f"?{key}=",
        answer=answer,
        prompt_tokens=length + QUERY_TOKENS,
        asked_pair_token=starts[asked],
    )


def addition_prompt(a: int, b: int, number: int) -> HeldOutPrompt:
    """`a+b=` and its sum."""
    prompt = f"{a}+{b}="
    return HeldOutPrompt(
        id=f"addition-{number:03d}",
        task="addition",
        prompt=prompt,
        answer=str(a + b),
        prompt_tokens=len(prompt),
        asked_pair_token=None,
    )


def draw_held_out_addition(rng: random.Random) -> tuple[int, int]:
    """Two numbers, each of 1 to 3 digits with equal chances, whose sum training never sees."""
    while True:
        a, b = (draw_number(rng) for _ in range(2))
        if is_held_out(a, b):
            return a, b


def draw_number(rng: random.Random) -> int:
    digits = rng.randint(1, MOST_DIGITS)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def held_out_prompts() -> list[HeldOutPrompt]:
    """The same prompts at every call: recall at evenly spread lengths, then distinct additions."""
    rng = random.Random(HELD_OUT_SEED)
    spread = LONGEST_RECALL - SHORTEST_RECALL
    prompts = [
        recall_prompt(rng, number, SHORTEST_RECALL + spread * number // (RECALL_PROMPTS - 1))
        for number in range(RECALL_PROMPTS)
    ]
    additions: dict[tuple[int, int], None] = {}
    while len(additions) < ADDITION_PROMPTS:
        additions[draw_held_out_addition(rng)] = None
    return prompts + [addition_prompt(a, b, number) for number, (a, b) in enumerate(additions)]
