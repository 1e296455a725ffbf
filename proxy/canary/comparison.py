# SPDX-License-Identifier: Apache-2.0
"""Whether two servers gave the same greedy answer, up to what rounding changes.

Answers are those of `/v1/completions` with `logprobs`, in the layout of OpenAI's API that all engines share.
Nothing here waits or sends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvferry.proxy.errors import NOT_JSON

NUM_LOGPROBS = 5
"""Alternatives that are requested for each token: where two tokens are nearly as likely, each server has
the other's choice among its own alternatives."""
FLOOR = 1e-3
"""The least tolerance where KV has 32 bits, in nats."""
ROUGH_FLOOR = 0.125
"""And where it has fewer, or the server does not say: of 16 bits, a logit of 8 is rounded to 1/32."""
FACTOR = 4.0
"""The tolerance is this times the largest difference that one server has shown against itself."""
MAX_TOLERANCE = 0.5
MAX_LEARNT = 256
"""Comparisons of one server with itself that count."""


class BadAnswer(ValueError):
    """A body that is no completion with logprobs."""


class GreedyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One greedy completion: its tokens, their logprobs in nats, and what else was likely there.

    `tokens`: as the server names them, by text or by id. `ids` and `prompt_ids`: empty if it does not say.
    """

    tokens: tuple[str, ...]
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...]
    alternatives: tuple[Mapping[str, float], ...]
    prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """What it cost, prompt included."""
        return self.prompt_tokens + len(self.tokens)

    def after(self, count: int) -> GreedyAnswer:
        """Return what follows the first `count` tokens."""
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[count:],
            logprobs=self.logprobs[count:],
            alternatives=self.alternatives[count:],
            ids=self.ids[count:],
        )


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _ChoiceLogprobs(msgspec.Struct):
    logprobs: _Logprobs
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _PromptUsage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class _Completion(msgspec.Struct):
    choices: Annotated[list[_ChoiceLogprobs], msgspec.Meta(min_length=1, max_length=1)]
    usage: _PromptUsage | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)


def read_answer(body: bytes) -> GreedyAnswer:
    """Return what a server answered. Raises `BadAnswer`."""
    try:
        completion = _COMPLETION.decode(body)
    except NOT_JSON as error:
        raise BadAnswer(f"not a completion with logprobs: {error}") from error
    [choice] = completion.choices
    found = choice.logprobs
    tops = found.top_logprobs if found.top_logprobs is not None else [None] * len(found.tokens)
    if not len(found.tokens) == len(found.token_logprobs) == len(tops):
        raise BadAnswer("its tokens and logprobs differ in number")
    return GreedyAnswer(
        tokens=tuple(found.tokens),
        ids=tuple(choice.token_ids or ()),
        prompt_ids=tuple(choice.prompt_token_ids or ()),
        logprobs=tuple(map(_number, found.token_logprobs)),
        alternatives=tuple({name: _number(each) for name, each in (top or {}).items()} for top in tops),
        prompt_tokens=0 if completion.usage is None else completion.usage.prompt_tokens,
    )


def _number(logprob: float | None) -> float:
    """JSON has no NaN: engines write null for it."""
    return math.nan if logprob is None else logprob


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`largest`: the largest difference of a logprob, in nats, up to the first token that differs; `gap`: by
    how much the servers disagree about that token, 0 if all are equal, infinite if it is no close choice or
    one answer is longer. `at`: the position of that token.
    """

    compared: int
    largest: float
    gap: float = 0.0
    at: int | None = None
    detail: str = ""

    @property
    def worst(self) -> float:
        return max(self.largest, self.gap)


def compare(reference: GreedyAnswer, answer: GreedyAnswer) -> Comparison:
    """Compare an answer with that of the reference, token by token, up to the first one that differs.

    After that the two answer different questions.
    """
    largest = 0.0
    for at, (expected, token) in enumerate(zip(reference.tokens, answer.tokens, strict=False)):
        if expected != token:
            gap = max(_lead(reference, at, token), _lead(answer, at, expected))
            return Comparison(
                compared=at, largest=largest, gap=gap, at=at, detail=f"{token!r} in place of {expected!r}"
            )
        difference = abs(reference.logprobs[at] - answer.logprobs[at])
        largest = math.inf if math.isnan(difference) else max(largest, difference)
    compared = min(len(reference.tokens), len(answer.tokens))
    if len(reference.tokens) != len(answer.tokens):
        detail = f"{len(answer.tokens)} tokens in place of {len(reference.tokens)}"
        return Comparison(compared=compared, largest=largest, gap=math.inf, at=compared, detail=detail)
    return Comparison(compared=compared, largest=largest)


def _lead(answer: GreedyAnswer, at: int, other: str) -> float:
    """By how much the answer's token was likelier there than `other`."""
    lead = answer.logprobs[at] - answer.alternatives[at].get(other, -math.inf)
    return math.inf if math.isnan(lead) else abs(lead)


class Tolerance:
    """What rounding may change at the servers of one model, as learnt from one server against itself.

    Batches of other shapes change the order of sums. So a server that computes the beginning of an answer as
    part of the prompt, where it was decoded before, differs from itself by about as much as another server
    may. Few prompts show that, so there is a least tolerance, `floor`.
    """

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._seen: deque[float] = deque(maxlen=MAX_LEARNT)

    @property
    def num_learnt(self) -> int:
        """From how many comparisons."""
        return len(self._seen)

    @property
    def value(self) -> float:
        """In nats."""
        return min(MAX_TOLERANCE, max(self._floor, FACTOR * max(self._seen, default=0.0)))

    def learn(self, comparison: Comparison) -> None:
        """Note how a server differed from itself. What exceeds every tolerance teaches nothing."""
        if comparison.worst <= MAX_TOLERANCE:
            self._seen.append(comparison.worst)
