# SPDX-License-Identifier: Apache-2.0
"""Whose mask is next, what a request may cost, and that nobody fails by another's grammar."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.grammar import compiler as compiler_module
from kvferry.agent.grammar import mask_queue
from kvferry.agent.grammar.compiler import GrammarCompiler
from kvferry.agent.grammar.mask_queue import MaskQueue
from kvferry.agent.messages.masks import Mask, MaskWanted, NoMaskFor, RequestOver
from tests.unit.agent.grammar.grammars import COSTLY_AFTER_DIGITS, DIGITS, lark, regex

MODEL = BUNDLED_MODELS / "ferry-tiny"
A, B, C = b"abc"


class Clock:
    """The processor's time, of which each mask of `costs` takes so much."""

    def __init__(self, costs: dict[int, float]) -> None:
        self._costs = costs
        self._now = 0.0
        self.key = 0
        self._asked = 0

    def __call__(self) -> float:
        self._asked += 1
        if self._asked % 2 == 0:
            self._now += self._costs.get(self.key, 0.0)
        return self._now


class Masks:
    """A queue, and what it has answered."""

    def __init__(self, costs: dict[int, float] | None = None, **kept: int) -> None:
        self.clock = Clock(costs or {})
        compiler = GrammarCompiler(MODEL, vocab_size=936, eos_ids=(935,))
        self.queue = MaskQueue(compiler, self.clock)
        self.tickets = 0
        self.order: list[int] = []

    def want(self, key: int, choice: int = 0, ids: tuple[int, ...] = (), grammar: str = "") -> int:
        self.tickets += 1
        self.queue.handle(MaskWanted(ticket=self.tickets, key=key, choice=choice, ids=ids, grammar=grammar))
        return self.tickets

    def next(self) -> Mask | NoMaskFor | None:
        wanted = self.queue.next()
        if wanted is None:
            return None
        self.clock.key = wanted.key
        self.order.append(wanted.key)
        return self.queue.compute(wanted)

    def ask(
        self, key: int, choice: int = 0, ids: tuple[int, ...] = (), grammar: str = ""
    ) -> Mask | NoMaskFor:
        self.want(key, choice, ids, grammar)
        answer = self.next()
        assert answer is not None
        return answer


def allowed(answer: Mask | NoMaskFor | None) -> set[int]:
    assert isinstance(answer, Mask), answer
    bits = np.unpackbits(np.frombuffer(answer.bits, dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def failure(answer: Mask | NoMaskFor | None) -> str:
    assert isinstance(answer, NoMaskFor), answer
    return answer.failure


def test_choices_go_on_by_themselves_and_are_told_their_new_tokens_alone() -> None:
    masks = Masks()
    assert allowed(masks.ask(1, 0, grammar=regex("a[bc]+"))) & {A, B, C} == {A}
    assert allowed(masks.ask(1, 0, (A,))) & {A, B, C} == {B, C}
    assert allowed(masks.ask(1, 1, (A, B))) & {A, B, C, 935} == {B, C, 935}
    assert allowed(masks.ask(1, 0, (B,))) & {A, B, C, 935} == {B, C, 935}


def test_a_cheap_grammar_waits_for_one_mask_of_a_costly_one_at_most() -> None:
    masks = Masks({1: 0.1, 2: 0.001})
    for choice in range(20):
        masks.want(1, choice, grammar=regex("a*"))
    masks.next()
    for turn in range(5):
        masks.want(2, 0, (A,) if turn else (), grammar=regex("a*"))
        masks.next()
        masks.next()
    assert masks.order.count(2) == 5
    for first, second in zip(masks.order[1::2], masks.order[2::2], strict=False):
        assert {first, second} == {1, 2}


def test_who_has_had_much_waits_no_longer_for_who_comes_now() -> None:
    masks = Masks({1: 0.004, 2: 0.1})
    masks.ask(1, grammar=regex("a*"))
    for _ in range(250):
        masks.ask(1, 0, (A,))
    for choice in range(20):
        masks.want(2, choice, grammar=regex("a*"))
    masks.order.clear()
    masks.want(1, 0, (A,))
    while 1 not in masks.order:
        masks.next()
    assert len(masks.order) <= 2


def test_who_costs_too_much_fails_by_name_and_the_others_go_on() -> None:
    masks = Masks({1: 0.1, 2: mask_queue.MAX_MASK_CPU_S / 2})
    masks.ask(1, grammar=regex("a*"))
    masks.ask(2, grammar=regex("a*"))
    answers = [masks.ask(1, 0, (A,)) for _ in range(25)]
    number = next(number for number, each in enumerate(answers) if isinstance(each, NoMaskFor))
    assert failure(answers[number]) == "grammar_too_costly"
    assert number * 0.1 < mask_queue.MAX_REQUEST_CPU_S + 0.2
    assert all(isinstance(masks.ask(2, 0, (A,)), Mask) for _ in range(1000))


def test_after_a_failure_its_other_masks_are_not_computed() -> None:
    masks = Masks({1: 10.0})
    for choice in range(5):
        masks.want(1, choice, grammar=regex("a*"))
    assert failure(masks.next()) == "grammar_too_costly"
    assert masks.next() is None


def test_of_a_request_that_is_over_nothing_is_left() -> None:
    masks = Masks()
    masks.want(1, grammar=regex("a*"))
    masks.queue.handle(RequestOver(key=1))
    assert masks.next() is None
    assert not masks.queue._requests
    masks.queue.handle(RequestOver(key=1))


def test_what_was_dropped_is_made_again_of_the_tokens() -> None:
    masks = Masks()
    masks.ask(1, 0, (A, B), grammar=regex("ab(ca)*"))
    masks.queue.drop_compiled()
    assert allowed(masks.ask(1, 0, (C,))) & {A, B, C, 935} == {A}


def test_a_grammar_s_failures_have_names() -> None:
    masks = Masks()
    assert failure(masks.ask(1, grammar=lark("start: ("))) == "invalid_grammar"
    assert failure(masks.ask(2, 0, (B,), grammar=regex("a*"))) == "nothing_allowed"


def test_one_that_meets_a_limit_fails_and_not_others_with_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_LEXER_FUEL", 5000)
    masks = Masks()
    for key in (1, 2):
        assert isinstance(masks.ask(key, 0, grammar=COSTLY_AFTER_DIGITS), Mask)
        assert isinstance(masks.ask(key, 1, tuple(DIGITS[:4])), Mask)
    for choice in (0, 2):  # one that goes on, and one that begins there
        assert failure(masks.ask(1, choice, tuple(DIGITS))) == "grammar_too_costly"
        assert isinstance(masks.ask(2, 0, tuple(DIGITS[:2])), Mask)
        assert isinstance(masks.ask(2, 1, tuple(DIGITS[:2])), Mask)
        assert isinstance(masks.ask(3 + choice, 0, grammar=COSTLY_AFTER_DIGITS), Mask)
