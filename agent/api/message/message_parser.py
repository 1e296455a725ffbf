# SPDX-License-Identifier: Apache-2.0
"""Turns the text of one answer into pieces of an assistant's message, as it comes.

What has been shown after some text depends on that text alone, however it was cut into pieces: a decode agent
that reads the text again, or goes on with a stream that broke, is where the other one was (I4). A whole
message is its pieces joined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.agent.api.message.call_syntax import CallPiece, CallReader, ObjectEnd, call_piece
from kvferry.agent.api.message.response_form import Mark, RegionForm, ResponseForm
from kvferry.agent.ids import AnswerId
from kvferry.common.hashing import Purpose, digest

_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS = 9
"""As many letters and digits as Mistral's chat templates insist on."""
_MAX_REREAD_CHARS = 64 * 1024
"""Characters of one answer that are read again: what looks like calls in each other is read once for each of
them. Beyond it none is."""
_OBJECT = re.compile(r"\s*[{\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How the answers to one request are read.

    `begun` is what the prompt has of the message, and `marks` the special tokens that are text. `tools` are
    those that may be called; without any, calls are text. With `one_call` a message ends after its first.
    Reasoning is kept apart from content if `reasoning`, and shown if `show_reasoning`.
    """

    form: ResponseForm
    begun: str = ""
    marks: frozenset[int] = frozenset()
    tools: Sequence[Mapping[str, Any]] = ()
    one_call: bool = False
    reasoning: bool = True
    show_reasoning: bool = True

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


@dataclass(slots=True)
class CallDelta:
    """A piece of the call number `index`; `id` and `name` come with its first one."""

    index: int
    id: str | None
    name: str | None
    arguments: str

    def body(self) -> dict[str, Any]:
        """Return it as an entry of a chunk's `tool_calls`."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **self.whole_body()}

    def whole_body(self) -> dict[str, Any]:
        """Return a whole call as an entry of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class MessageDelta:
    """What a message gained."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def body(self) -> dict[str, Any]:
        """Return its members in a chunk of a stream."""
        body: dict[str, Any] = {}
        if self.reasoning:
            body["reasoning_content"] = self.reasoning
        if self.content:
            body["content"] = self.content
        if self.calls:
            body["tool_calls"] = [call.body() for call in self.calls]
        return body

    def whole_body(self) -> dict[str, Any]:
        """Return the members of a whole message. Of one that was read from its beginning to its end."""
        body: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            body["reasoning_content"] = self.reasoning
        if self.calls:
            body["tool_calls"] = [call.whole_body() for call in self.calls]
        if len(body) > 2:
            body["content"] = self.content or None
        return body

    def add(self, later: MessageDelta) -> None:
        """Append the next one."""
        self.content += later.content
        self.reasoning += later.reasoning
        for call in later.calls:
            self.add_call(call)

    def add_call(self, call: CallDelta) -> None:
        """Append a piece of a call, if it is the last one's to that."""
        if call.name is None and self.calls and self.calls[-1].index == call.index:
            self.calls[-1].arguments += call.arguments
        else:
            self.calls.append(CallDelta(call.index, call.id, call.name, call.arguments))


def call_id(answer: AnswerId, choice: int, index: int) -> str:
    """Return the id of a call: every agent that goes on with an answer gives the same one."""
    number, letters = int.from_bytes(digest(Purpose.TOOL_CALL, answer, str(choice), str(index), size=8)), ""
    for _ in range(_ID_CHARS):
        number, letter = divmod(number, len(_ID_LETTERS))
        letters += _ID_LETTERS[letter]
    return letters


class MessageParser:
    """Reads one choice of an answer, region by region, between the marks of the form.

    A mark counts only where it can: the end of calls not within a call, the begin of reasoning only where the
    message begins.
    """

    def __init__(self, wanted: MessageFormat, answer: AnswerId, choice: int) -> None:
        self._wanted = wanted
        self._answer = answer
        self._choice = choice
        regions = wanted.form.regions(reasoning=wanted.reasoning, calls=bool(wanted.tools))
        self._regions = [(region, region.begin) for region in regions if region.begin is not None]
        self._outside = next((region.end for region in regions if region.begin is None), None)
        """The mark at the end of what is in no region: it is no text."""
        self._text = ""
        self._at = 0
        """Where in the text what is not understood yet begins."""
        self._is_blank = True
        """Whether all before is space."""
        self._begins_from = 0
        """Where in the text a region may begin: one that was none does not begin again."""
        self._content = _Content()
        self._shown: _Content | _Reasoning = self._content
        """What text is shown as that is no call."""
        self._calls: CallReader | _TemplateCalls | None = None
        """What reads the region that is open, if it is one of calls."""
        self._region: RegionForm | None = None
        self._begin = ""
        """The mark at its begin."""
        self._num_reread = 0
        """How many characters were read as calls and then as content."""
        self._num_calls = 0
        self._is_broken = False
        """Whether there is a call of which not all is there."""
        self.reasoning = range(0)
        """Which characters of the answer were reasoning, in the last region of it."""
        self.ended = False
        """Whether the message ends here, whatever comes."""
        self.push(wanted.begun)  # the prompt's own, which is not shown again
        self._shown.finish()

    @property
    def has_whole_calls(self) -> bool:
        """Whether a message that has ended has calls, and all of each."""
        return self._num_calls > 0 and not self._is_broken

    @property
    def num_read(self) -> int:
        """Of how many characters of the answer it is known whether they are reasoning."""
        return (self._at if self._calls is None else len(self._text)) - len(self._wanted.begun)

    def push(self, text: str) -> MessageDelta:
        """Add text; returns what the message gained."""
        assert not self.ended
        self._text += text
        return self._read(MessageDelta(), last=False)

    def finish(self) -> MessageDelta:
        """No more text will come: return all that was held back."""
        if self.ended:
            return MessageDelta()
        delta = self._read(MessageDelta(), last=True)
        while self._calls is not None and not self.ended:
            self._add_calls(self._calls.finish(self._text), delta)
            if self._calls.is_refused:
                self._leave_calls(self._calls, delta)
                self._read(delta, last=True)
            else:
                self._close(len(self._text))
        delta.content += self._content.finish()
        return delta

    def _read(self, delta: MessageDelta, *, last: bool) -> MessageDelta:
        while not self.ended and self._advance(delta, last):
            pass
        return delta

    def _advance(self, delta: MessageDelta, last: bool) -> bool:
        """Understand one more part of the text. Returns whether there may be another."""
        if self._calls is not None:
            return self._read_calls(self._calls, delta, last)
        if self._region is None:
            return self._read_outside(delta, last)
        end, until = self._find_end(self._at, last)
        self._show(until, delta)
        return end is not None and self._close(end.end())

    def _read_outside(self, delta: MessageDelta, last: bool) -> bool:
        """Show content up to where a region begins."""
        marks: list[tuple[re.Match[str] | None, int, RegionForm | None]]
        marks = [(*self._find_begin(region, begin, last), region) for region, begin in self._regions]
        if self._outside is not None:
            marks.append((*self._outside.find(self._text, self._at, last=last), None))
        until = min([pending for _, pending, _ in marks], default=len(self._text))
        found = [(mark, region) for mark, _, region in marks if mark is not None and mark.start() < until]
        if not found:
            self._show(until, delta)
            return False
        mark, region = min(found, key=lambda each: (each[0].start(), -each[0].end()))
        self._show(mark.start(), delta)
        if region is None:
            self._at = mark.end()
        else:
            self._open(region, mark)
        return region is not None or mark.end() > mark.start()

    def _open(self, region: RegionForm, begin: re.Match[str]) -> None:
        self._region, self._begin, self._at = region, begin[0], begin.end()
        self._begins_from = max(begin.start() + 1, begin.end())
        self._is_blank = False
        if region.kind == "reasoning":
            self._content.region_begins()
            self._shown = _Reasoning(shown=self._wanted.show_reasoning)
            begin_at = begin.end() - len(self._wanted.begun)
            self.reasoning = range(begin_at, begin_at)
        elif region.kind == "calls":
            syntax = self._wanted.form.calls
            self._calls = (
                _TemplateCalls(self._wanted, region, begin.start(), begin.end())
                if syntax is None
                else CallReader(syntax, self._wanted.tool_names, begin.end(), one_call=self._wanted.one_call)
            )

    def _find_begin(self, region: RegionForm, begin: Mark, last: bool) -> tuple[re.Match[str] | None, int]:
        """Find where a region begins, and where text begins that may yet be that."""
        found, pending = begin.find(self._text, max(self._at, self._begins_from), last=last)
        before = self._text[self._at : pending if found is None else found.start()]
        if region.is_first and not (self._is_blank and not before.strip()):
            return None, len(self._text)
        return found, pending

    def _find_end(self, at: int, last: bool) -> tuple[re.Match[str] | None, int]:
        """Find where the region ends; returns also up to where text is within it for certain."""
        assert self._region is not None
        if self._region.end is None:
            return None, len(self._text)
        found, pending = self._region.end.find(self._text, at, last=last)
        return found, pending if found is None else found.start()

    def _show(self, until: int, delta: MessageDelta) -> None:
        text = self._text[self._at : until]
        self._shown.push(text, delta)
        self._is_blank = self._is_blank and not text.strip()
        self._at = until
        if isinstance(self._shown, _Reasoning):
            self.reasoning = range(self.reasoning.start, until - len(self._wanted.begun))

    def _close(self, at: int) -> bool:
        if self._calls is not None:
            self._is_broken |= self._calls.has_broken
        self._at, self._region, self._calls, self._shown = at, None, None, self._content
        return True

    def _read_calls(self, calls: CallReader | _TemplateCalls, delta: MessageDelta, last: bool) -> bool:
        self._add_calls(calls.read(self._text), delta)
        end = None
        if not calls.is_refused and not calls.is_within_call:
            end, until = self._find_end(calls.at, last)
            if last and end is None:
                _, until = self._find_end(calls.at, last=False)  # half a mark is no content
            self._add_calls(calls.end(self._text, until, None if end is None else end[0]), delta)
        if self._wanted.one_call and calls.num_complete:
            self.ended, self._is_broken = True, calls.has_broken
            return False
        if calls.is_refused:
            return self._leave_calls(calls, delta)
        return end is not None and self._close(end.end())

    def _leave_calls(self, calls: CallReader | _TemplateCalls, delta: MessageDelta) -> bool:
        """Go on with content: it is no call what comes next, or the whole region if it had none."""
        self._is_broken |= calls.has_broken
        if calls.num_calls:
            self._at = calls.at
        else:
            self._content.push(self._begin, delta)
        self._num_reread += len(self._text) - self._at
        if self._num_reread > _MAX_REREAD_CHARS:
            self._regions = [each for each in self._regions if each[0].kind != "calls"]
        if not calls.num_calls or self._region is None or self._region.end is None:
            self._region = None
        self._calls = None
        return True

    def _add_calls(self, pieces: Sequence[CallPiece], delta: MessageDelta) -> None:
        """Add pieces of calls to a delta, of which the first one's beginning makes a new call."""
        for piece in pieces:
            if piece.name is not None:
                if self._num_calls and self._wanted.one_call:
                    return
                self._content.region_begins()
                identity = call_id(self._answer, self._choice, self._num_calls)
                delta.add_call(CallDelta(self._num_calls, identity, piece.name, piece.arguments))
                self._num_calls += 1
            else:
                delta.add_call(CallDelta(self._num_calls - 1, None, None, piece.arguments))


class _Content:
    """All content of a message. Space between it and other regions is left out."""

    def __init__(self) -> None:
        self._held = ""
        """Space, of which it is not known yet whether content follows."""
        self._beside_region = False
        """Whether another region is on one side of that space, or in it."""
        self._begun = False

    def push(self, text: str, delta: MessageDelta) -> None:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            delta.content += kept if self._begun or not self._beside_region else kept.lstrip()
            self._begun, self._beside_region = True, False

    def region_begins(self) -> None:
        """Note that another region is here."""
        self._beside_region = True

    def finish(self) -> str:
        """No more content will come for now: return what was held back."""
        held, self._held = self._held, ""
        return "" if self._beside_region else held


class _Reasoning:
    """Reasoning, without the space around it."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._held = ""
        self._begun = False

    def push(self, text: str, delta: MessageDelta) -> None:
        text = self._held + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._begun = self._begun or bool(kept)
        if self._shown:
            delta.reasoning += kept

    def finish(self) -> None:
        """No more will come for now: what was held back is space."""
        self._held = ""


class _TemplateCalls:
    """A region of calls that the checkpoint's response template reads, once it is whole.

    Its members mean what those of `CallReader` mean.
    """

    def __init__(self, wanted: MessageFormat, region: RegionForm, begin: int, at: int) -> None:
        self._wanted = wanted
        self._region = region
        self._begin = begin
        self._body = self.at = at
        self._value: ObjectEnd | None = None
        self.num_calls = self.num_complete = 0
        self.has_broken = self.is_refused = self.is_within_call = False

    def read(self, text: str) -> list[CallPiece]:
        """See `CallReader`. Within JSON, marks are text."""
        if self._region.is_json and self._value is None and _OBJECT.match(text, self.at):
            self._value = ObjectEnd(0)
            self.is_within_call = True
        if self._value is not None and self.is_within_call:
            self.at = self._value.find(text, self.at)
            self.is_within_call = self._value.depth > 0
        return []

    def end(self, text: str, until: int, mark: str | None) -> list[CallPiece]:
        """See `CallReader`."""
        if mark is None:
            self.at = until
            return []
        body = self._region.body
        is_read = body is None or body.fullmatch(text, self._body, until) is not None
        calls = self._parsed(text[self._begin : until] + mark) if is_read else []
        self.num_calls = self.num_complete = len(calls)
        self.is_refused = not calls
        return calls

    def finish(self, text: str) -> list[CallPiece]:
        """See `CallReader`."""
        if self._region.end is None:
            return self.end(text, len(text), "")
        self.is_refused = self.has_broken = True
        return []

    def _parsed(self, text: str) -> list[CallPiece]:
        """Read the region; empty where the template finds no call in it."""
        from transformers.utils.chat_parsing import parse_response

        tools: list[dict[str, Any] | Callable[..., Any]] = [dict(tool) for tool in self._wanted.tools]
        try:
            message = parse_response(text, self._wanted.form.template, prefix="", tools=tools)
            found = message.get("tool_calls") or []
            values = [
                each.get("function", each) if isinstance(each, dict) else each
                for each in (found if isinstance(found, list) else [found])
            ]
            calls = [call_piece(json.dumps(value, ensure_ascii=False)) for value in values]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        return [call for call in calls if call is not None and call.name in self._wanted.tool_names]
