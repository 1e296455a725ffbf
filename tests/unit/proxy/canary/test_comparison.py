# SPDX-License-Identifier: Apache-2.0
"""Which differences between two answers are rounding, and which are wrong."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvferry.proxy.canary.comparison import (
    FACTOR,
    FLOOR,
    MAX_TOLERANCE,
    BadAnswer,
    Comparison,
    GreedyAnswer,
    Tolerance,
    compare,
    read_answer,
)


def answer(*tokens: tuple[str, float], others: dict[int, dict[str, float]] | None = None) -> GreedyAnswer:
    return GreedyAnswer(
        tokens=tuple(token for token, _ in tokens),
        logprobs=tuple(logprob for _, logprob in tokens),
        alternatives=tuple((others or {}).get(at, {}) for at in range(len(tokens))),
        prompt_tokens=3,
    )


def test_equal_answers_do_not_differ() -> None:
    ours = answer(("a", -0.1), ("b", -2.0))
    assert compare(ours, ours) == Comparison(compared=2, largest=0.0)


def test_the_largest_difference_of_a_logprob_counts() -> None:
    found = compare(answer(("a", -0.1), ("b", -2.0)), answer(("a", -0.15), ("b", -1.7)))
    assert found.largest == found.worst == pytest.approx(0.3)


def test_a_close_choice_ends_the_comparison() -> None:
    """Both nearly took the other's token; what follows cannot be compared."""
    ours = answer(("a", -0.1), ("b", -0.700), ("c", -0.1), others={1: {"x": -0.702}})
    theirs = answer(("a", -0.1), ("x", -0.701), ("d", -9.0), others={1: {"b": -0.7015}})
    found = compare(ours, theirs)
    assert (found.compared, found.at, found.largest) == (1, 1, 0.0)
    assert found.worst == pytest.approx(0.002)


@pytest.mark.parametrize(
    "others",
    [
        {"ours": {"x": -5.0}, "theirs": {"b": -0.701}},
        {"ours": {"x": -0.701}, "theirs": {"b": -5.0}},
        {"ours": {}, "theirs": {"b": -0.701}},
        {"ours": {"x": -0.701}, "theirs": {}},
    ],
)
def test_another_token_is_wrong_where_either_server_was_sure(others: dict[str, dict[str, float]]) -> None:
    ours = answer(("b", -0.7), others={0: others["ours"]})
    theirs = answer(("x", -0.7), others={0: others["theirs"]})
    assert compare(ours, theirs).worst > 1.0


def test_a_shorter_answer_is_wrong() -> None:
    ours, theirs = answer(("a", -0.1), ("b", -0.1)), answer(("a", -0.1))
    assert compare(ours, theirs).worst == compare(theirs, ours).worst == math.inf


def test_what_is_no_number_is_wrong() -> None:
    assert compare(answer(("a", -0.1)), answer(("a", math.nan))).worst == math.inf


def body(**logprobs: Any) -> bytes:
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": logprobs}
    return msgspec.json.encode({"model": "m", "choices": [choice], "usage": {"prompt_tokens": 7}})


def test_an_answer_is_read() -> None:
    read = read_answer(
        body(tokens=["a", "b"], token_logprobs=[-0.5, None], top_logprobs=[{"a": -0.5, "c": None}, None])
    )
    assert (read.tokens, read.logprobs[0], read.num_tokens) == (("a", "b"), -0.5, 9)
    assert math.isnan(read.logprobs[1]) and math.isnan(read.alternatives[0]["c"])
    assert read.alternatives[1] == {}


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"logprobs": null}]}',
        body(tokens=["a"], token_logprobs=[]),
        body(tokens=["a"], token_logprobs=[0.0], top_logprobs=[]),
        body(tokens=["a"], token_logprobs=["x"]),
    ],
)
def test_what_is_no_answer_is_said_to_be_none(bad: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_answer(bad)


def test_the_tolerance_is_learnt_and_bounded() -> None:
    tolerance = Tolerance(FLOOR)
    assert (tolerance.value, tolerance.num_learnt) == (FLOOR, 0)
    tolerance.learn(Comparison(compared=1, largest=0.01))
    tolerance.learn(Comparison(compared=1, largest=0.002, gap=0.02))
    assert (tolerance.value, tolerance.num_learnt) == (pytest.approx(FACTOR * 0.02), 2)
    tolerance.learn(Comparison(compared=1, largest=0.4))
    assert tolerance.value == MAX_TOLERANCE


def test_a_server_that_disagrees_with_itself_teaches_nothing() -> None:
    """Else one broken answer of the reference would excuse every other one."""
    tolerance = Tolerance(FLOOR)
    tolerance.learn(Comparison(compared=1, largest=0.0, gap=math.inf))
    assert (tolerance.value, tolerance.num_learnt) == (FLOOR, 0)


def test_the_second_half_of_an_answer_can_be_compared_alone() -> None:
    ours = answer(("a", -0.1), ("b", -0.2), ("c", -0.3), others={2: {"d": -0.31}})
    assert ours.after(2) == answer(("c", -0.3), others={0: {"d": -0.31}})
    assert compare(ours.after(2), answer(("d", -0.3), others={0: {"c": -0.305}})).worst < 0.02
