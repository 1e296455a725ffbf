# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvferry import models
from kvferry.agent.grammar import compiler as grammar
from kvferry.agent.grammar.compiler import BadGrammar, GrammarCompiler

MODEL = Path(models.__path__[0]) / "ferry-tiny"
EOS = 935
A, B = ord("a"), ord("b")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL, vocab_size=936, eos_ids=(EOS, 930))


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def allowed(compiler: GrammarCompiler, text: str, pattern: str) -> set[int]:
    matcher = compiler.matcher(regex(pattern))
    matcher.add([ord(char) for char in text])
    return set(np.flatnonzero(matcher.allowed()).tolist())


def test_a_mask_follows_from_the_grammar_and_the_tokens(compiler: GrammarCompiler) -> None:
    assert allowed(compiler, "", "ab?") >= {A}
    assert EOS not in allowed(compiler, "", "ab?")
    assert allowed(compiler, "a", "ab?") == {B, EOS, 930}
    assert allowed(compiler, "ab", "ab?") == {EOS, 930}


def test_answers_with_one_grammar_go_on_by_themselves(compiler: GrammarCompiler) -> None:
    first, second = compiler.matcher(regex("a|bb")), compiler.matcher(regex("a|bb"))
    first.add([B])
    assert not first.allowed()[A]
    assert second.allowed()[A]
    # Token by token or at once, it is the same state.
    second.add([B])
    assert np.array_equal(first.allowed(), second.allowed())


def test_a_token_that_is_not_allowed_leaves_nothing(compiler: GrammarCompiler) -> None:
    assert allowed(compiler, "x", "a") == set()


def test_ids_that_only_the_model_has_are_never_allowed() -> None:
    padded = GrammarCompiler(MODEL, vocab_size=1000, eos_ids=(EOS,)).matcher(regex("(.|\\n)*")).allowed()
    assert padded.shape == (1000,)
    assert not padded[936:].any()


def test_few_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_COMPILED", 3)
    compiler = GrammarCompiler(MODEL, vocab_size=936, eos_ids=(EOS,))
    for number in range(9):
        compiler.matcher(regex(f"a{{{number + 1}}}"))
    assert len(compiler._compiled) == 3
    with pytest.raises(BadGrammar):
        compiler.matcher(regex("("))
    assert len(compiler._compiled) == 3
