# SPDX-License-Identifier: Apache-2.0
"""What the client of a stream has so far, so that another pair can go on from there.

Events of the native dialect begin with a line that is a comment to SSE, `: t CHOICE ID,ID…[ FINISH_REASON]`:
the output ids behind the event, and whether they end the choice. An event that is this line alone reports ids
whose text is still held back, and `: t end` says that only `[DONE]` is to come. The relay cuts these lines
out and keeps them as they are; they are parsed only when a stream breaks. Since only whole events are passed
on, they say exactly what the client has.

Servers of other engines report ids within their events. Such a stream has one choice; its ids are noted in
the same form (`add`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kvferry.proxy.errors import AnswerDiverged, BadResponse
from kvferry.proxy.wire.kv_params import FirstToken

MARK = b": t "
MAX_LINES_BYTES = 16 * 1024 * 1024
"""Most bytes of token lines of one stream: a million tokens and more."""
END_LINE = b": t end\n"
_ONLY_CHOICE = b": t 0 "
# A line break within an event's data is escaped, so every line that begins like this is a token line.
_TOKEN_LINES = re.compile(rb"^: t .*\n\n?", re.MULTILINE)
_TOKEN_LINE = re.compile(rb": t (\d+) (\d+(?:,\d+)*)(?: (stop|length))?")


class SentChoice(msgspec.Struct):
    """What the client has of one choice."""

    output_ids: list[int]
    finish_reason: str | None = None

    def begins_with(self, first: FirstToken | None) -> bool:
        """Whether a prefill began this choice. `first` is None where its response ended every choice."""
        return self.finish_reason is not None if first is None else self.output_ids[0] == first.id


class SentTokens:
    """Per choice of a stream, the output ids that the client has and how the choice ended.

    Of other engines' servers, ids of which no text was shown (half a character) are not the client's yet: the
    next server samples them again. Our agents' are: the next agent holds the same text back.
    """

    __slots__ = ("_lines", "_num_choices", "_unshown")

    def __init__(self, num_choices: int = 1) -> None:
        self._num_choices = num_choices
        self._lines = bytearray()
        self._unshown = bytearray()
        """Lines of other engines' ids that came last, without a text."""

    @property
    def begun(self) -> bool:
        """Whether the client has anything yet."""
        return bool(self._lines)

    @property
    def complete(self) -> bool:
        """Whether the client has the end of every choice; of our agents' streams, everything but `[DONE]`."""
        return self._lines.endswith(END_LINE)

    @property
    def num_held(self) -> int:
        """Bytes that are kept of the lines."""
        return len(self._lines) + len(self._unshown)

    @property
    def ids(self) -> bytes:
        """The ids of the only choice, as the inside of a JSON list."""
        lines = self._lines.removesuffix(END_LINE)
        return bytes(lines[len(_ONLY_CHOICE) : -1].replace(b"\n" + _ONLY_CHOICE, b","))

    @property
    def count(self) -> int:
        """How many ids of the only choice the client has."""
        return _count(self._lines)

    @property
    def count_sampled(self) -> int:
        """The same with those behind which there is no text."""
        return self.count + _count(self._unshown)

    @property
    def num_tokens(self) -> int:
        """How many tokens of all choices agents have sent, with those behind which there is no text."""
        num_lines = self._lines.count(b"\n") - self.complete
        return num_lines + self._lines.count(b",") + _count(self._unshown)

    def strip(self, events: bytes) -> bytes:
        """Note the token lines of whole events; returns the events without them, maybe none.

        Raises `BadResponse` when there are too many, as do `strip_one` and `add`.
        """
        return _TOKEN_LINES.sub(self._note, events)

    def strip_one(self, event: bytes) -> bytes:
        """`strip` for one event that follows its token line, which is nearly always so."""
        end = event.index(b"\n") + 1
        self._lines += event[:end]
        if len(self._lines) > MAX_LINES_BYTES:
            raise _too_many()
        return event[end:]

    def add(self, ids: bytes, *, has_text: bool) -> None:
        """Note the ids of one event of the only choice, as the inside of a JSON list without spaces."""
        added = self._lines if has_text else self._unshown
        if has_text and self._unshown:
            added += self._unshown
            self._unshown.clear()
        added += b": t 0 %b\n" % ids
        if len(added) > MAX_LINES_BYTES:
            raise _too_many()

    def end(self) -> None:
        """Note that the client has the end of every choice. Idempotent."""
        if not self.complete:
            self._lines += END_LINE

    def begin(self, tokens: Sequence[FirstToken]) -> frozenset[int]:
        """Note token 1 of every choice, none where the prefill's response ended them all; returns the choices
        for which it is news to the client.

        Raises `AnswerDiverged` when a choice that the client knows is not the one that the prefill began.
        """

        def first(index: int) -> FirstToken | None:
            return tokens[index] if tokens else None

        known = enumerate(self.choices() if self._lines else ())
        has = {index: choice for index, choice in known if choice.output_ids}
        news = frozenset(range(self._num_choices)) - has.keys()
        if not all(choice.begins_with(first(index)) for index, choice in has.items()):
            raise AnswerDiverged("the retried prefill sampled another first token")
        for index in sorted(news) if tokens else ():
            token = tokens[index]
            end = f" {token.finish_reason}" if token.finish_reason else ""
            self._lines += f": t {index} {token.id}{end}\n".encode()
        return news

    def resume(self) -> list[SentChoice] | None:
        """What a decode agent needs to go on from here; None while token 1 of each choice is all there is."""
        if self._lines.count(b"\n") == self._num_choices and b"," not in self._lines:
            return None
        return self.choices()

    def choices(self) -> list[SentChoice]:
        """Every choice's tokens. Raises `BadResponse` when a line is not of this dialect."""
        choices = [SentChoice([]) for _ in range(self._num_choices)]
        for line in self._lines.splitlines():
            match = _TOKEN_LINE.fullmatch(line)
            if match is None or int(match[1]) >= len(choices):
                raise BadResponse("an agent's token line cannot be read")
            choice = choices[int(match[1])]
            choice.output_ids += map(int, match[2].split(b","))
            choice.finish_reason = match[3].decode() if match[3] else None
        return choices

    def go_on_elsewhere(self) -> None:
        """Another server goes on after what the client has."""
        self._unshown.clear()

    def _note(self, line: re.Match[bytes]) -> bytes:
        self._lines += line[0].rstrip(b"\n") + b"\n"
        if len(self._lines) > MAX_LINES_BYTES:
            raise _too_many()
        return b""


def _count(lines: bytearray) -> int:
    """How many ids there are in lines of one choice."""
    return lines.count(b",") + lines.count(_ONLY_CHOICE)


def _too_many() -> BadResponse:
    return BadResponse(f"an agent's token lines exceed {MAX_LINES_BYTES} bytes")
