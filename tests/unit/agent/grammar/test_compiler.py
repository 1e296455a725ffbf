# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.grammar import compiler as grammar
from kvferry.agent.grammar.compiler import BadGrammar, GrammarCompiler, Matcher, NoMask
from tests.unit.agent.grammar.grammars import COSTLY_AFTER_DIGITS, DIGITS, regex

MODEL = BUNDLED_MODELS / "ferry-tiny"
EOS = 935
A, B = ord("a"), ord("b")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL, vocab_size=936, eos_ids=(EOS, 930))


def unpacked(matcher: Matcher, vocab_size: int = 936) -> npt.NDArray[np.bool_]:
    bits = np.frombuffer(matcher.mask(), dtype=np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


def allowed(compiler: GrammarCompiler, text: str, pattern: str) -> set[int]:
    matcher = compiler.matcher(regex(pattern))
    matcher.add([ord(char) for char in text])
    return set(np.flatnonzero(unpacked(matcher)).tolist())


def test_a_mask_follows_from_the_grammar_and_the_tokens(compiler: GrammarCompiler) -> None:
    assert allowed(compiler, "", "ab?") >= {A}
    assert EOS not in allowed(compiler, "", "ab?")
    assert allowed(compiler, "a", "ab?") == {B, EOS, 930}
    assert allowed(compiler, "ab", "ab?") == {EOS, 930}


def test_answers_with_one_grammar_go_on_by_themselves(compiler: GrammarCompiler) -> None:
    first, second = compiler.matcher(regex("a|bb")), compiler.matcher(regex("a|bb"))
    first.add([B])
    assert not unpacked(first)[A]
    assert unpacked(second)[A]
    # Token by token or at once, it is the same state.
    second.add([B])
    assert first.mask() == second.mask()


def test_after_a_token_that_is_not_allowed_there_is_no_mask(compiler: GrammarCompiler) -> None:
    with pytest.raises(NoMask) as info:
        allowed(compiler, "x", "a")
    assert info.value.failure == "nothing_allowed"


def test_a_mask_that_takes_too_much_is_none_and_takes_the_lexer_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_LEXER_FUEL", 5000)
    compiler = GrammarCompiler(MODEL, vocab_size=936, eos_ids=(EOS,))
    first, second = compiler.matcher(COSTLY_AFTER_DIGITS), compiler.matcher(COSTLY_AFTER_DIGITS)
    assert second.mask()
    first.add(DIGITS)
    with pytest.raises(NoMask) as info:
        first.mask()
    assert info.value.failure == "grammar_too_costly"
    assert "\n" not in str(info.value)
    # llguidance's doing: hence `discard`.
    with pytest.raises(NoMask):
        compiler.matcher(COSTLY_AFTER_DIGITS).mask()
    compiler.discard(second)
    compiler.matcher(COSTLY_AFTER_DIGITS).mask()


def test_ids_that_only_the_model_has_are_never_allowed() -> None:
    compiler = GrammarCompiler(MODEL, vocab_size=1000, eos_ids=(EOS,))
    assert not unpacked(compiler.matcher(regex("(.|\\n)*")), 1000)[936:].any()


def test_few_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_COMPILED", 3)
    compiler = GrammarCompiler(MODEL, vocab_size=936, eos_ids=(EOS,))
    for number in range(9):
        compiler.matcher(regex(f"a{{{number + 1}}}"))
    assert len(compiler._compiled) == 3
    with pytest.raises(BadGrammar):
        compiler.matcher(regex("("))
    assert len(compiler._compiled) == 3
