# SPDX-License-Identifier: Apache-2.0
"""Turns token ids of one choice into text that may be shown, piece by piece.

A piece never ends inside a character, and never holds what may turn out to be the start of a stop string.
What has been released after some ids depends on those ids alone: a decode agent that pushes the prefill's ids
again has the prefill's state, and knows what its response already showed.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from kvferry.agent.api.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# More ids than a character has bytes: what they spell is no character, and reading them again with every
# further id would cost the square of their number.
_MAX_HELD_IDS = 16


class Detokenizer:
    """Text of one choice, cut before the first stop string.

    Args:
        stop: Strings that end the choice.
        min_tokens: Text of fewer tokens than this is shown without looking for stop strings.
        include_stop: Cut after the stop string instead.
        show_special: Special tokens are text like any other.
        shown: Special tokens that are text in any case.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
        show_special: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self._text = text_stream(tokenizer, show_special=show_special, shown=shown)
        self._include_stop = include_stop
        self._stop = tuple(stop)
        self._begun = [_BegunStop(each) for each in self._stop]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; nothing is released after that."""

    @property
    def num_chars(self) -> int:
        """How many characters the tokens so far have, whether they have been released or not."""
        return self._text.num_chars

    @property
    def token_begin(self) -> int:
        """Where the text of the last token begins: one that is a piece of a character, where that does."""
        return self._text.token_begin

    def push(self, token_id: int) -> str:
        """Add one token and return the text that may now be shown, often none."""
        assert self.found is None
        self._num_tokens += 1
        text = self._text.push(token_id)
        self._held += text
        return self._release(len(self._held) - max((each.push(text) for each in self._begun), default=0))

    def finish(self) -> str:
        """No more tokens will come: return all that was held back, broken characters as U+FFFD."""
        if self.found is not None:
            return ""
        self._held += self._text.finish()
        return self._release(len(self._held))

    def _release(self, end: int) -> str:
        if self._num_tokens < self._min_tokens:
            end = len(self._held)
            for begun in self._begun:
                begun.size = 0
        else:
            found = [(at, len(stop), stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
            if found:
                begin, length, self.found = min(found)
                end = begin + length if self._include_stop else begin
        released, self._held = self._held[:end], self._held[end:]
        return released


class _BegunStop:
    """How much of a stop string the end of the text is: constant work a character (Knuth, Morris, Pratt).

    Looked for anew with each token, a text that only ever begins it would cost its length each time.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0, 0]
        """By size of a beginning, the longest beginning that is also its end, as far as one was needed."""
        self.size = 0

    def push(self, text: str) -> int:
        """Add text; returns the size of the longest end of all text that begins the stop string."""
        for char in text:
            if self.size == len(self._stop):
                break
            while self.size and self._stop[self.size] != char:
                self.size = self._border(self.size)
            self.size += self._stop[self.size] == char
        return self.size

    def _border(self, size: int) -> int:
        while len(self._borders) <= size:
            char, border = self._stop[len(self._borders) - 1], self._borders[-1]
            while border and self._stop[border] != char:
                border = self._borders[border]
            self._borders.append(border + (self._stop[border] == char))
        return self._borders[size]


def text_stream(tokenizer: Tokenizer, *, show_special: bool, shown: Collection[int] = ()) -> TextStream:
    """Return what reads ids with this tokenizer; the arguments are as in `Detokenizer`."""
    kind = _ByteLevelText if tokenizer.byte_level else _WindowedText
    return kind(tokenizer, show_special, frozenset(shown))


class TextStream(Protocol):
    """Ids to whole characters. All pieces joined equal the tokenizer's own reading of all ids."""

    num_chars: int
    """How many characters there are so far."""
    token_begin: int
    """Where the text of the last id begins: one that is a piece of a character, where that does."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelText:
    """For tokenizers whose text is the UTF-8 reading of their tokens' bytes: constant work per token."""

    def __init__(self, tokenizer: Tokenizer, show_special: bool, shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._shown_ids = shown
        self._utf8 = _Utf8()
        self.num_chars = self.token_begin = 0

    def push(self, token_id: int) -> str:
        self.token_begin = self.num_chars
        if self._tokenizer.has_no_text(token_id, self._show_special or token_id in self._shown_ids):
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self.token_begin += self._utf8.num_spoiled
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        text = self._utf8.finish()
        self.num_chars += len(text)
        return text


class _Utf8:
    """Reads UTF-8 as it comes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_spoiled = 0
        """How many characters of the last text are of bytes before, which it does not go on with."""

    def decode(self, piece: bytes) -> str:
        begun = self._decoder.getstate()[0]
        goes_on = not piece or 0x80 <= piece[0] < 0xC0
        self.num_spoiled = 0 if goes_on else len(begun.decode(errors="replace"))
        return self._decoder.decode(piece)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowedText:
    """For every other tokenizer: read a short window of ids again, and show what is new in it.

    The window begins with the ids of the last piece shown, because decoders treat the first token of a text
    differently from the rest (they strip a leading space).
    """

    def __init__(self, tokenizer: Tokenizer, show_special: bool, shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._shown_ids = shown
        self._ids: list[int] = []
        self._num_shown = 0
        self._shown = ""
        self._run = _Utf8()
        """Of the byte tokens since the last piece."""
        self._num_run = 0
        """How many characters they have."""
        self.num_chars = self.token_begin = 0

    def push(self, token_id: int) -> str:
        self.token_begin = self.num_chars + self._num_run
        if self._tokenizer.has_no_text(token_id, self._show_special or token_id in self._shown_ids):
            return ""
        self._ids.append(token_id)
        # The decoder reads a run of byte tokens as a whole: one bad byte spoils it, so it must end first.
        if self._tokenizer.is_byte_token(token_id):
            self._num_run += len(self._run.decode(self._tokenizer.token_bytes(token_id)))
            self.token_begin += self._run.num_spoiled
            return ""
        text = self._read()
        piece = text[len(self._shown) :]
        self.token_begin = self.num_chars + max(0, len(piece) - len(self._tokenizer.token_text(token_id)))
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._num_shown < _MAX_HELD_IDS:
            return ""
        del self._ids[: self._num_shown]
        self._num_shown = len(self._ids)
        self._shown = self._read()
        return self._counted(piece)

    def finish(self) -> str:
        piece = self._read()[len(self._shown) :]
        self._ids.clear()
        self._num_shown = 0
        self._shown = ""
        return self._counted(piece)

    def _counted(self, piece: str) -> str:
        self.num_chars += len(piece)
        if self._num_run:
            self._run, self._num_run = _Utf8(), 0
        return piece

    def _read(self) -> str:
        # Only what has text is among the ids, so no special token is shown that should not be.
        return self._tokenizer.decode(self._ids, show_special=True)
