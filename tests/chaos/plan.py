# SPDX-License-Identifier: Apache-2.0
"""What a chaos run asks and breaks, drawn from its seed before anything starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.common.roles import Role
from tests.helpers.client import heldout

Blow = Literal["kill", "stop"]
Part = Literal["api", "engine", "rank", "all"]

ROUND_REQUESTS = 50
LEAVING_SHARE, LONGEST_STAY_S = 0.06, 2.0
ROLES: dict[Role, tuple[str, str]] = {
    "prefill": ("prefill-0", "prefill-1"),
    "decode": ("decode-0", "decode-1"),
}
_KILLED: Sequence[Part] = ("api", "engine", "rank")
_STOPPED: Sequence[Part] = (*_KILLED, "all")
TASK_TOKENS, LONG_TOKENS = 16, 96
LONG_PROMPT_TOKENS = 250
"""Long answers go with short prompts: a decode step costs what its context costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: which question, whether its answer is streamed, when its client leaves (if it does)."""

    question: int
    stream: bool
    leave_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Once `after` requests of the round have begun, hit one part of an agent.

    A killed agent is started again; a stopped one goes on after `seconds`.
    """

    after: int
    agent: str
    blow: Blow
    part: Part
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Requests and what happens meanwhile. Afterwards everything lives, and nothing may be left over."""

    asks: tuple[Ask, ...]
    strikes: tuple[Strike, ...]


def make_questions(seed: int, count: int) -> list[dict[str, Any]]:
    """Bodies of distinct requests: greedy and sampled, one choice and four, task answers and long runs."""
    draw = random.Random(f"questions {seed}")
    prompts = draw.sample(heldout(), count)
    short = [prompt for prompt in heldout() if prompt.prompt_tokens <= LONG_PROMPT_TOKENS]
    made = []
    for index, prompt in enumerate(prompts):
        long = draw.random() < 0.5
        made.append(
            {
                "model": "ferry-tiny",
                "prompt": (draw.choice(short) if long else prompt).prompt,
                "temperature": draw.choice((0.0, 1.0)),
                "seed": index,
                "n": draw.choice((1, 1, 4)),
                "max_tokens": LONG_TOKENS if long else TASK_TOKENS,
                "ignore_eos": long,
            }
        )
    return made


def make_rounds(
    seed: int, requests: int, questions: int, stop_s: tuple[float, float], round_size: int = ROUND_REQUESTS
) -> list[Round]:
    """The whole run. Each role is struck in every round, and over two rounds every role is killed once; which
    of them first depends on the seed.
    """
    draw = random.Random(f"rounds {seed}")
    rounds: list[Round] = []
    while requests > 0:
        size = min(requests, round_size)
        asks = tuple(_ask(draw, questions) for _ in range(size))
        rounds.append(Round(asks=asks, strikes=_strikes(draw, seed + len(rounds), size, stop_s)))
        requests -= size
    return rounds


def _ask(draw: random.Random, questions: int) -> Ask:
    leaves = draw.random() < LEAVING_SHARE
    return Ask(
        question=draw.randrange(questions),
        stream=draw.random() < 0.5,
        leave_s=draw.uniform(0.0, LONGEST_STAY_S) if leaves else None,
    )


def _strikes(draw: random.Random, number: int, size: int, stop_s: tuple[float, float]) -> tuple[Strike, ...]:
    """`number` counts the rounds, from the seed on."""
    killed = sorted(ROLES)[number % 2]
    strikes = [
        _strike(draw, role, "kill", _KILLED, size, stop_s)
        if role == killed
        else _strike(draw, role, "stop", _STOPPED, size, stop_s)
        for role in ROLES
    ]
    if draw.random() < 0.5:
        # A reader's rank stands still: leases end before their reads have begun, or while they run.
        strikes.append(_strike(draw, "decode", "stop", ("rank",), size, stop_s))
    else:
        strikes.append(_strike(draw, draw.choice(sorted(ROLES)), "stop", _STOPPED, size, stop_s))
    return tuple(sorted(strikes, key=lambda strike: strike.after))


def _strike(
    draw: random.Random,
    role: Role,
    blow: Blow,
    parts: Sequence[Part],
    size: int,
    stop_s: tuple[float, float],
) -> Strike:
    return Strike(
        after=draw.randrange(1, max(2, size * 3 // 5)),
        agent=draw.choice(ROLES[role]),
        blow=blow,
        part=draw.choice(parts),
        seconds=draw.uniform(*stop_s),
    )
