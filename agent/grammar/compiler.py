# SPDX-License-Identifier: Apache-2.0
"""Grammars that constrain answers, compiled by llguidance: which tokens may come next.

What may come next is a function of the grammar and of the answer's tokens so far, so every agent that has
both goes on alike (I4).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

_MAX_COMPILED = 32
_MAX_REASON_CHARS = 300


class BadGrammar(ValueError):
    """llguidance does not take it; the message says why, in one line."""


class Matcher:
    """One answer against its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def add(self, ids: Sequence[int]) -> None:
        """Advance by tokens, each of which was allowed."""
        self._matcher.consume_tokens(list(ids))

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, shape [vocabulary]; none where a limit of llguidance is met.

        Those that end an answer may where it is complete.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # llguidance allows the end then
            return np.zeros(self._vocab_size, dtype=np.bool_)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)


class GrammarCompiler:
    """Compiles grammars for one checkpoint's tokenizer, and keeps the last ones."""

    def __init__(
        self, directory: Path, *, vocab_size: int | None = None, eos_ids: Sequence[int] = ()
    ) -> None:
        """
        Args:
            directory: The checkpoint's.
            vocab_size: The model's; the tokenizer's if it is not known.
            eos_ids: The tokens that end an answer; what the tokenizer suggests if they are not known.

        Raises:
            OSError: there is no tokenizer.json.
            ValueError: llguidance cannot use it.
        """
        spec = (directory / "tokenizer.json").read_text()
        ends = list(eos_ids) or None
        tokenizer = LLTokenizer(spec, eos_token=ends)
        if vocab_size is not None and tokenizer.vocab_size < vocab_size:
            tokenizer = LLTokenizer(spec, n_vocab=vocab_size, eos_token=ends)
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of an answer.

        Args:
            grammar: llguidance's JSON form of it.

        Raises:
            BadGrammar: it is none, or beyond llguidance's limits.
        """
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0)
            if compiled.is_error():
                raise BadGrammar(_first_line(compiled.get_error()))
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(compiled.deep_copy(), self._vocab_size)


def _first_line(error: str) -> str:
    """Shorten an error of llguidance, which goes on with where in its own form of the grammar it is."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    # Of a regular expression, the reason comes last.
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "invalid")
    return reason.removeprefix("error: ")[:_MAX_REASON_CHARS]
