# SPDX-License-Identifier: Apache-2.0
"""Turns the text of one answer into pieces of an assistant's message, as it comes.

What has been shown after some text depends on that text alone, however it was cut into pieces: a decode agent
that reads the text again, or goes on with a stream that broke, is where the other one was (I4). A whole
message is its pieces joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.agent.api.message.call_syntax import CallPiece, CallReader, call_piece
from kvferry.agent.api.message.response_form import REGION_KINDS, ResponseForm
from kvferry.agent.ids import AnswerId
from kvferry.common.hashing import Purpose, digest

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS = 9
"""As many letters and digits as Mistral's chat templates insist on."""


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
    """Reads one choice of an answer."""

    def __init__(self, wanted: MessageFormat, answer: AnswerId, choice: int) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._wanted = wanted
        self._answer = answer
        self._choice = choice
        self._template = wanted.form.regions(reasoning=wanted.reasoning, calls=bool(wanted.tools))
        self._parser = ResponseParser(self._template, prefix=wanted.begun)
        self._text = wanted.begun
        self._at = 0
        """Where in the text what comes next begins, or a mark before it."""
        self._content = _Content()
        self._region: _Region = self._content
        self._num_calls = 0
        self.ended = False
        """Whether the message ends here, whatever comes."""
        self._read(self._parser.initial_events)  # the prompt's own, which is not shown again

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> MessageDelta:
        """Add text; returns what the message gained."""
        assert not self.ended
        self._text += text
        return self._read(self._parser.feed(text))

    def finish(self) -> MessageDelta:
        """No more text will come: return all that was held back."""
        if self.ended:
            return MessageDelta()
        _, events = self._parser.finalize()
        delta = self._read(events)
        delta.content += self._content.finish()
        return delta

    def _read(self, events: Sequence[Mapping[str, Any]]) -> MessageDelta:
        delta = MessageDelta()
        for event in events:
            if self.ended:
                break
            field_of = self._template.fields[event["field"]]
            if event["type"] == "region_open":
                self._region = self._opened(event["field"], field_of)
            elif event["type"] == "region_chunk":
                self._at = self._text.index(event["text"], self._at) + len(event["text"])
                self._region.push(event["text"], delta)
            else:
                end = field_of.close_re and field_of.close_re.match(self._text, self._at)
                self._at = end.end() if end else self._at
                self._region.close(end[0] if end else "", delta)
        return delta

    def _opened(self, name: str, field_of: ResponseTemplateField) -> _Region:
        kind = REGION_KINDS.get(name, "content")
        begin = field_of.open_re and field_of.open_re.search(self._text, self._at)
        self._at = begin.end() if begin else self._at
        if kind == "content":
            return self._content
        if kind == "reasoning":
            return _Reasoning(self._content, shown=self._wanted.show_reasoning)
        return _Calls(self, self._content, self._wanted, begin[0] if begin else "")

    def add_calls(self, pieces: Sequence[CallPiece], delta: MessageDelta) -> None:
        """Add pieces of calls to a delta, of which the first one's beginning makes a new call."""
        for piece in pieces:
            if piece.name is not None:
                if self._num_calls and self._wanted.one_call:
                    return
                identity = call_id(self._answer, self._choice, self._num_calls)
                delta.add_call(CallDelta(self._num_calls, identity, piece.name, piece.arguments))
                self._num_calls += 1
            else:
                delta.add_call(CallDelta(self._num_calls - 1, None, None, piece.arguments))

    def call_ended(self) -> None:
        """Note that a call is whole."""
        self.ended = self._wanted.one_call


class _Region(Protocol):
    """What is done with the text of a region; `close` gets the mark at its end."""

    def push(self, text: str, delta: MessageDelta) -> None: ...

    def close(self, end: str, delta: MessageDelta) -> None: ...


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

    def close(self, end: str, delta: MessageDelta) -> None:
        """Content goes on after other regions."""

    def region_ended(self) -> None:
        """Note that another region has been here."""
        self._beside_region = True

    def finish(self) -> str:
        """No more content will come: return what was held back."""
        return "" if self._beside_region else self._held


class _Reasoning:
    """Reasoning, without the space around it."""

    def __init__(self, content: _Content, *, shown: bool) -> None:
        self._content = content
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

    def close(self, end: str, delta: MessageDelta) -> None:
        self._content.region_ended()


class _Calls:
    """A region of calls. What turns out to be no call of a tool is content."""

    def __init__(self, parser: MessageParser, content: _Content, wanted: MessageFormat, begin: str) -> None:
        self._parser = parser
        self._content = content
        self._wanted = wanted
        self._text = begin
        syntax = wanted.form.calls
        self._reader = None if syntax is None else CallReader(syntax, wanted.tool_names)
        self._is_content = False

    def push(self, text: str, delta: MessageDelta) -> None:
        if self._is_content:
            self._content.push(text, delta)
            return
        self._text += text
        if self._reader is not None:
            self._parser.add_calls(self._reader.feed(text), delta)
            if self._reader.is_refused:
                self._show_as_content(delta)
            elif self._reader.num_complete:
                self._parser.call_ended()

    def close(self, end: str, delta: MessageDelta) -> None:
        if self._is_content:
            self._content.push(end, delta)
            return
        self._text += end
        calls = self._parsed() if self._reader is None else self._reader.finish()
        self._parser.add_calls(calls, delta)
        if (self._reader is None and not calls) or (self._reader is not None and self._reader.is_refused):
            self._show_as_content(delta)
            return
        self._content.region_ended()
        if self._reader is None or self._reader.num_complete:
            self._parser.call_ended()

    def _show_as_content(self, delta: MessageDelta) -> None:
        self._is_content = True
        self._content.push(self._text, delta)

    def _parsed(self) -> list[CallPiece]:
        """Read the region by the checkpoint's own response template; empty where that finds no call in it."""
        from transformers.utils.chat_parsing import parse_response

        tools: list[dict[str, Any] | Callable[..., Any]] = [dict(tool) for tool in self._wanted.tools]
        try:
            message = parse_response(self._text, self._wanted.form.template, prefix="", tools=tools)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        found = message.get("tool_calls") or []
        values = [
            each.get("function", each) if isinstance(each, dict) else each
            for each in (found if isinstance(found, list) else [found])
        ]
        calls = [call_piece(value) for value in values]
        return [call for call in calls if call is not None and call.name in self._wanted.tool_names]
