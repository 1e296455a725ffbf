# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything is generated."""

from __future__ import annotations

import pytest

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.grammar import compiler as compiler_module
from kvferry.agent.grammar import trial as trial_module
from kvferry.agent.grammar.compiler import GrammarCompiler
from kvferry.agent.grammar.trial import trial
from tests.unit.agent.grammar.grammars import COSTLY, costly, lark, regex

MODEL = BUNDLED_MODELS / "ferry-tiny"


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL)


@pytest.mark.parametrize("grammar", [regex("a"), regex("[a-z]{1,60}"), lark('start: "a" start | "b"')])
def test_what_is_cheap_can_be_used(compiler: GrammarCompiler, grammar: str) -> None:
    assert trial(compiler, grammar) == ""
    assert not compiler._compiled


def test_what_cannot_be_compiled_is_refused_in_one_line(compiler: GrammarCompiler) -> None:
    assert "\n" not in trial(compiler, lark("start: (")) != ""


def test_what_compiles_for_too_long_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles well within the time after which the process is killed."""
    monkeypatch.setattr(trial_module, "MAX_COMPILE_CPU_S", 1e-6)
    assert trial(compiler, regex("a")) == "it takes too long to compile"


def test_masks_after_the_first_count_too(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """These compile in a hundredth of a second, and each mask takes as long."""
    monkeypatch.setattr(trial_module, "MAX_MASKS_CPU_S", 0.1)
    assert trial(compiler, costly(100)) == "its masks take too much processor time"
    assert trial(compiler, costly(100, "/[0-9]{6}/")) == "its masks take too much processor time"
    # What comes later is left to the budget of a request.
    assert trial(compiler, costly(100, "/[0-9]{400}/")) == ""


def test_a_grammar_whose_first_mask_meets_a_limit_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_LEXER_FUEL", 5000)
    assert "take too much" in trial(GrammarCompiler(MODEL), COSTLY)
