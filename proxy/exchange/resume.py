# SPDX-License-Identifier: Apache-2.0
"""What the client of a stream has so far, so that another pair can go on from there.

Events of the native dialect begin with a line that is a comment to SSE, `: t CHOICE ID,ID…[ FINISH_REASON]`:
the output ids behind the event, and whether they end the choice. An event that is this line alone reports ids
whose text is still held back, and `: t end` says that only `[DONE]` is to come. The relay cuts these lines
out and keeps them as they are; they are parsed only when a stream breaks. Since only whole events are passed
on, they say exactly what the client has.

Servers of other engines report ids within their events (`SentTokens`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kvferry.proxy.dialects.native import NativePrefill
from kvferry.proxy.errors import AnswerDiverged, BadResponse
from kvferry.proxy.wire.kv_params import FirstToken

MARK = b": t "
MAX_LINES_BYTES = 16 * 1024 * 1024
"""Of the token lines of one stream: a million tokens and more."""
_END_LINE = b": t end\n"
# A line break within an event's data is escaped, so every line that begins like this is a token line.
_TOKEN_LINES = re.compile(rb"^: t .*\n\n?", re.MULTILINE)
_TOKEN_LINE = re.compile(rb": t (\d+) (\d+(?:,\d+)*)(?: (stop|length))?")


@dataclass(slots=True)
class _SentChoice:
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def begins_with(self, first: FirstToken | None) -> bool:
        """Whether a prefill began this choice. `first` is None where its response ended every choice."""
        return self.finish_reason is not None if first is None else self.output_ids[0] == first.id


class Progress:
    """Per choice, the output ids that the client has and how the choice ended."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._lines = bytearray()

    @property
    def begun(self) -> bool:
        """Whether the client has anything yet."""
        return bool(self._lines)

    @property
    def complete(self) -> bool:
        """Whether the client has everything but `[DONE]`."""
        return self._lines.endswith(_END_LINE)

    @property
    def num_held(self) -> int:
        """Bytes that are kept of the lines."""
        return len(self._lines)

    def strip(self, events: bytes) -> bytes:
        """Note the token lines of whole events; returns the events without them, maybe none.

        Raises `BadResponse` when there are too many, as does `strip_one`.
        """
        return _TOKEN_LINES.sub(self._note, events)

    def strip_one(self, event: bytes) -> bytes:
        """`strip` for one event that follows its token line, which is nearly always so."""
        end = event.index(b"\n") + 1
        self._add(event[:end])
        return event[end:]

    def end(self) -> None:
        """Note that the client has everything: the response ended with its prefill leg."""
        self._add(_END_LINE)

    def begin(self, prefill: NativePrefill) -> frozenset[int]:
        """Note token 1 of every choice; returns the choices for which it is news to the client.

        Raises `AnswerDiverged` when a choice that the client knows is not the one that the prefill began.
        """
        known = self._read()
        news = frozenset(index for index, choice in enumerate(known) if not choice.output_ids)
        for index, choice in enumerate(known):
            token = prefill.first_tokens[index] if prefill.first_tokens else None
            if index not in news and not choice.begins_with(token):
                raise AnswerDiverged("the retried prefill sampled another first token")
            if index in news and token is not None:
                end = f" {token.finish_reason}" if token.finish_reason else ""
                self._lines += f": t {index} {token.id}{end}\n".encode()
        return news

    def resume(self) -> list[dict[str, Any]] | None:
        """What a decode agent needs to go on from here; None while token 1 is all that there is."""
        if not self.begun:
            return None
        known = self._read()
        if all(len(choice.output_ids) <= 1 for choice in known):
            return None
        return [{"output_ids": each.output_ids, "finish_reason": each.finish_reason} for each in known]

    def _note(self, line: re.Match[bytes]) -> bytes:
        self._add(line[0].rstrip(b"\n") + b"\n")
        return b""

    def _add(self, line: bytes) -> None:
        self._lines += line
        if len(self._lines) > MAX_LINES_BYTES:
            raise BadResponse(f"an agent's token lines exceed {MAX_LINES_BYTES} bytes")

    def _read(self) -> list[_SentChoice]:
        """Every choice's tokens. Raises `BadResponse` when a line is not of this dialect."""
        choices = [_SentChoice() for _ in range(self._num_choices)]
        for line in self._lines.splitlines():
            match = _TOKEN_LINE.fullmatch(line)
            if match is None or int(match[1]) >= len(choices):
                raise BadResponse("an agent's token line cannot be read")
            choice = choices[int(match[1])]
            choice.output_ids += map(int, match[2].split(b","))
            choice.finish_reason = match[3].decode() if match[3] else None
        return choices


class SentTokens:
    """The output ids behind what the client has of a stream of one choice of other engines' servers.

    Ids come with the text of their event. Those of which no text was shown (half a character) are not the
    client's yet: the next server samples them again.
    """

    __slots__ = ("_has_unshown", "_shown", "_unshown", "has_ended")

    def __init__(self) -> None:
        self._shown = bytearray()
        self._unshown = bytearray()
        self._has_unshown = False
        self.has_ended = False
        """Whether the client has the end of the choice."""

    @property
    def begun(self) -> bool:
        """Whether the client has any text, or the end."""
        return bool(self._shown) or self.has_ended

    @property
    def ids(self) -> bytes:
        """Those that the client has, as the inside of a JSON list."""
        return bytes(self._shown[:-1])

    @property
    def count(self) -> int:
        """How many ids the client has."""
        return self._shown.count(b",")

    @property
    def count_sampled(self) -> int:
        """The same with those behind which there is no text."""
        return self.count + self._unshown.count(b",")

    @property
    def num_held(self) -> int:
        """Bytes that are kept of the ids."""
        return len(self._shown) + len(self._unshown)

    def add(self, ids: bytes, *, has_text: bool) -> None:
        """Note the ids of one event, as the inside of a JSON list without spaces.

        Raises `BadResponse` when there are too many.
        """
        added = self._shown if has_text else self._unshown
        if has_text and self._has_unshown:
            added += self._unshown
            self._unshown.clear()
        self._has_unshown = not has_text
        added += ids + b","
        if len(added) > MAX_LINES_BYTES:
            raise BadResponse(f"the token ids of a stream exceed {MAX_LINES_BYTES} bytes")

    def go_on_elsewhere(self) -> None:
        """Another server goes on after what the client has."""
        self._unshown.clear()
        self._has_unshown = False
