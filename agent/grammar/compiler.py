# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars by llguidance, and says which tokens may come next.

What may come next is a function of the grammar and of the answer's tokens so far, so every agent that has
both goes on alike (I4).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.agent.messages.masks import MaskFailure

_MAX_COMPILED = 32
_MAX_REASON_CHARS = 300
MAX_LEXER_FUEL = 100_000
"""Work that one mask may take, in llguidance's units. Schemas of hundreds of fields take a fifth of it with a
vocabulary of 100,000 tokens; all of it takes 0.1 s."""
MAX_PARSER_ITEMS = 10_000
"""Most Earley items of one mask; schemas take a third of it."""


class BadGrammar(ValueError):
    """llguidance does not take it; the message says why, in one line."""


class NoMask(Exception):
    """What may come next cannot be said; the message says why, in one line."""

    def __init__(self, failure: MaskFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Matcher:
    """One answer against its grammar."""

    def __init__(self, compiled: LLMatcher, grammar: str) -> None:
        self.compiled = compiled
        """What it was made of. Its lexer is shared by all matchers that were: its states, and its failure."""
        self.grammar = grammar
        self._matcher = compiled.deep_copy()

    def add(self, ids: Sequence[int]) -> None:
        """Advance by tokens, each of which was allowed."""
        self._matcher.consume_tokens(list(ids))

    def mask(self) -> bytes:
        """Return which tokens may come next, a bit each, the lowest first.

        Those that end an answer may where it is complete.

        Raises:
            NoMask: a token was not allowed, or a limit of llguidance is met.
        """
        if self._matcher.is_error():
            raise NoMask("nothing_allowed", _first_line(self._matcher.get_error()))
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # llguidance allows the end then
            reason = _first_line(self._matcher.get_error())
            raise NoMask("grammar_too_costly", f"the masks of this grammar take too much ({reason})")
        return bits


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
        self._limits = LLParserLimits(
            step_lexer_fuel=MAX_LEXER_FUEL, step_max_items=MAX_PARSER_ITEMS, verbose_errors=False
        )
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @property
    def eos_ids(self) -> Sequence[int]:
        """The tokens that end an answer."""
        return self._tokenizer.eos_tokens

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of an answer.

        Args:
            grammar: llguidance's JSON form of it.

        Raises:
            BadGrammar: it is none, or beyond llguidance's limits.
        """
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if compiled.is_error():
                raise BadGrammar(_first_line(compiled.get_error()))
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(compiled, grammar)

    def discard(self, matcher: Matcher) -> None:
        """Make the next matcher of this one's grammar of a lexer that is not its."""
        if self._compiled.get(matcher.grammar) is matcher.compiled:
            del self._compiled[matcher.grammar]

    def clear(self) -> None:
        """Keep nothing. Memory comes back once no matcher is left either."""
        self._compiled.clear()


def _first_line(error: str) -> str:
    """Shorten an error of llguidance, which goes on with where in its own form of the grammar it is."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    # Of a regular expression, the reason comes last.
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "invalid")
    return reason.removeprefix("error: ")[:_MAX_REASON_CHARS]
