# SPDX-License-Identifier: Apache-2.0
"""How models write calls of tools: read as the text comes, and written down as a grammar. Pure.

Every syntax here is a name and JSON arguments with fixed text around them, so that arguments can be shown
piece by piece, as the model wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_HEAD_CHARS = 4096
"""Of a call up to its arguments; a longer one is shown when it is whole."""
MAX_FORCED_CALLS = 16
"""In an answer that must have calls: without a bound, a model could go on with them until its limit."""
_ANY_TEXT = "/(.|\\n)*/"
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python writes JSON, and as chat templates therefore show it to a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The text of calls.

    `head` matches a call up to its arguments, with the group `name`; `begins` is a pattern, in Rust's
    dialect, of a text up to where it can only be a call. Written down, calls are `begin`, then
    each call as `before_name`, its name, `after_name`, its arguments and `after_arguments`, with `between`
    two of them, then `end`. `tokens` are the marks in it that a tokenizer may have as one token; the first
    begins the calls. Of calls that are not `parallel` an answer has one. With `in_object` the arguments are a
    member of a JSON object.
    """

    head: re.Pattern[str]
    begins: str
    before_name: str
    after_name: str
    after_arguments: str
    arguments: str = "arguments"
    begin: str = ""
    between: str = ""
    end: str = ""
    tokens: tuple[str, ...] = ()
    in_object: bool = False
    parallel: bool = True

    def grammar(
        self,
        tools: Mapping[str, Any],
        *,
        several: bool,
        with_content: bool,
        reasoning: str,
        token_id: Callable[[str], int | None],
    ) -> str:
        """Return a grammar, in llguidance's dialect of Lark, of an answer with calls.

        Args:
            tools: The JSON schema of each tool's arguments, by name.
            several: Whether there may be more than one call.
            with_content: Whether there may be content before them, or nothing else.
            reasoning: A rule named `reasoning` that comes before all that, or "".
            token_id: Finds the id of a mark that is one token.
        """

        def literal(text: str) -> str:
            return lark_literal(text, self.tokens, token_id)

        names = [f"tool{number}" for number in range(len(tools))]
        more = f" (between call){{0,{MAX_FORCED_CALLS - 1}}}" if several and self.parallel else ""
        whole, content = f"begin call{more} end", ""
        if with_content:
            whole, content = self._after_content(f"{more} end", literal, token_id)
        lines = [f"start: {'reasoning ' if reasoning else ''}{whole}"]
        lines += [each for each in (reasoning, content) if each]
        for rule, text in (("begin", self.begin), ("between", self.between), ("end", self.end)):
            lines.append(f"{rule}: {literal(text)}")
        lines += [f"call: {literal(self.before_name)} called", "called: " + " | ".join(names)]
        for rule, (name, schema) in zip(names, tools.items(), strict=True):
            lines.append(f"{rule}: {literal(name + self.after_name)} {rule}_arguments after")
            lines.append(f"{rule}_arguments: %json {json.dumps({**schema, 'x-guidance': _SEPARATORS})}")
        return "\n".join([*lines, f"after: {literal(self.after_arguments)}"])

    def _after_content(
        self, further: str, literal: Callable[[str], str], token_id: Callable[[str], int | None]
    ) -> tuple[str, str]:
        """Return content with or without calls after it, and the rules that this needs.

        `further` is what comes after the first call.
        """
        mark = self.tokens[0] if self.tokens else ""
        if mark and token_id(mark) is None:
            # Only a lazy lexeme ends where a mark is that is text like any other.
            rest = literal((self.begin + self.before_name).removeprefix(mark))
            content = f"opening[lazy]: CONTENT {json.dumps(mark)}\nfirst: {rest} called\nCONTENT: {_ANY_TEXT}"
            return f"(CONTENT | opening first{further})", content
        return f"CONTENT (begin call{further})?", f"CONTENT: {_ANY_TEXT} & ~/{self.begins}(.|\\n)*/"


def reasoning_rule(begin: str, end: str, *, begun: bool, token_id: Callable[[str], int | None]) -> str:
    """Return the rules of reasoning before what is constrained; it may be left out unless it has `begun`."""
    is_token = token_id(end) is not None
    text = f"TEXT {lark_literal(end, (end,), token_id)}" if is_token else "reasoning_text"
    whole = f"{text} /[ \\n]{{0,4}}/"
    opening = lark_literal(begin, (begin,), token_id)
    rule = f"reasoning: {whole}" if begun else f"reasoning: ({opening} {whole})?"
    rest = f"TEXT: {_ANY_TEXT}" if is_token else f"reasoning_text[suffix={json.dumps(end)}]: {_ANY_TEXT}"
    return f"{rule}\n{rest}"


def lark_literal(text: str, tokens: Collection[str], token_id: Callable[[str], int | None]) -> str:
    """Return a text in Lark; of `tokens`, those that the tokenizer has by their id."""
    marks = [token for token in tokens if token_id(token) is not None]
    if not marks:
        return json.dumps(text, ensure_ascii=False)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    spelled = [
        f"<[{token_id(part)}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    ]
    return " ".join(spelled) or '""'


@dataclass(slots=True)
class CallPiece:
    """A piece of a call: its `name` if it begins here, and a part of the text of its arguments."""

    name: str | None
    arguments: str


class CallReader:
    """Reads the text of one region of calls as it comes.

    What it returns after some text depends on that text alone, however it was cut into pieces.
    """

    def __init__(self, syntax: CallSyntax, tools: Collection[str]) -> None:
        self._syntax = syntax
        self._tools = tools
        self._text = ""
        self._at = 0
        """Where what has not been understood yet begins."""
        self._value: _ObjectEnd | None = None
        """The end of the arguments that are being read."""
        self._rest: _ObjectEnd | None = None
        """The end of the object around a call whose arguments have been read."""
        self.num_calls = 0
        self.num_complete = 0
        """Of these calls, how many have been read to their end."""
        self.is_refused = False
        """Whether this is no call of one of the tools."""

    def feed(self, text: str) -> list[CallPiece]:
        """Add text; returns what it shows of calls. Nothing after `is_refused`."""
        self._text += text
        pieces: list[CallPiece] = []
        while not self.is_refused and self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[CallPiece]:
        """No more text will come: return the calls of which nothing has been shown yet.

        They are those whose members have another order. Sets `is_refused` if the region has no call at all.
        """
        if self._value is not None or self._rest is not None:
            return []
        calls = self._whole_calls()[self.num_calls :]
        self.num_calls += len(calls)
        self.num_complete += len(calls)
        self.is_refused = self.is_refused or not self.num_calls
        return calls

    def _advance(self, pieces: list[CallPiece]) -> bool:
        """Understand one more part of the text. Returns whether there may be another."""
        if self._value is not None:
            end = self._value.find(self._text, self._at)
            shown = self._text[self._at : end]
            self._at += len(shown)
            if shown:
                pieces.append(CallPiece(None, shown))
            if self._value.depth:
                return False
            self._value = None
            # `{"name": …, "arguments": {…}` has its own end yet to come.
            self._rest = _ObjectEnd(1) if self._syntax.in_object else None
            self.num_complete += not self._syntax.in_object
            return True
        if self._rest is not None:
            self._at = self._rest.find(self._text, self._at)
            if self._rest.depth:
                return False
            self._rest = None
            self.num_complete += 1
            return True
        return self._begin(pieces)

    def _begin(self, pieces: list[CallPiece]) -> bool:
        if (
            len(self._text) - self._at > MAX_HEAD_CHARS
        ):  # looked at again with each token, it would cost its square
            return False
        head = self._syntax.head.match(self._text, self._at)
        if head is None:
            return False
        name = _name(head["name"])
        if name not in self._tools:
            self.is_refused = not self.num_calls
            return False
        self.num_calls += 1
        self._at = head.end()
        self._value = _ObjectEnd(0)
        pieces.append(CallPiece(name, ""))
        return True

    def _whole_calls(self) -> list[CallPiece]:
        try:
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            return []
        found = [
            call_piece(each, self._syntax.arguments)
            for each in (value if isinstance(value, list) else [value])
        ]
        return [call for call in found if call is not None and call.name in self._tools]


def call_piece(value: object, member: str = "arguments") -> CallPiece | None:
    """Return a call that was read as JSON, an object with `name` and arguments; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(member, value.get("arguments", {}))
    if isinstance(given, str):
        return CallPiece(value["name"], given)
    return (
        CallPiece(value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None
    )


def _name(spelled: str) -> str:
    """Read a name, which is a JSON string in some syntaxes."""
    if not spelled.startswith('"'):
        return spelled
    try:
        return msgspec.json.decode(spelled, type=str)
    except msgspec.DecodeError:
        return ""


class _ObjectEnd:
    """Looks for the end of a JSON object through pieces of text, `depth` objects or arrays deep."""

    _MARK = re.compile(r'["{}\[\]]')
    _STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
    _HALF_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._in_string = False

    def find(self, text: str, at: int) -> int:
        """Return where the object ends, or the end of the text that has been looked at, before that."""
        while True:
            if self._in_string:
                string = self._STRING.match(text, at)
                if string is None:
                    half = self._HALF_STRING.match(text, at)
                    assert half is not None
                    return half.end()  # a lone backslash waits for what it escapes
                self._in_string, at = False, string.end()
            mark = self._MARK.search(text, at)
            if mark is None:
                return len(text)
            at = mark.end()
            if mark[0] == '"':
                self._in_string = True
            else:
                self.depth += 1 if mark[0] in "{[" else -1
                if self.depth <= 0:
                    self.depth = 0
                    return at
