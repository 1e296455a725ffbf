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
from msgspec import Raw

from kvferry.common.exceptions import NOT_JSON

MAX_HEAD_CHARS = 4096
"""Longest head of a call, up to its arguments; a call with a longer one is shown when it is whole."""
_ARGUMENTS = ("arguments", "parameters")
"""The members under which models write arguments, whichever of them their template shows."""
_NULL = Raw(b"null")
_DESCRIPTIVE = frozenset({"name", "id", "type"})
"""The members of a call that do not say what it is called with."""
_AROUND_MEMBERS = " \t\r\n,}]"
MAX_FORCED_CALLS = 16
"""In an answer that must have calls: without a bound, a model could go on with them until its limit."""
_ANY_TEXT = "/(.|\\n)*/"
_BETWEEN = re.compile(r"[\s,;\]}]*")
"""What may stand after a call of a list, and says nothing."""
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python writes JSON, and as chat templates therefore show it to a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The text of calls.

    `head` matches a call up to its arguments, with the group `name`; `opening` matches all that may still
    become a call. `begins` is a pattern, in Rust's
    dialect, of a text up to where it can only be a call. Written down, calls are `begin`, then
    each call as `before_name`, its name, `after_name`, its arguments and `after_arguments`, with `between`
    two of them, then `end`. `tokens` are the marks in it that a tokenizer may have as one token; the first
    begins the calls. Of calls that are not `parallel` an answer has one. With `in_object` the arguments are a
    member of a JSON object.
    """

    head: re.Pattern[str]
    opening: re.Pattern[str]
    begins: str
    before_name: str
    after_name: str
    after_arguments: str
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
    """Reads the calls of one region of a text as it comes.

    What it returns after some text depends on that text alone, however it was cut into pieces. Whatever is in
    a call belongs to it, so a mark that ends regions counts only while `is_within_call` is false.

    Args:
        syntax: How the calls are written.
        tools: The names of those that may be called.
        at: Where the region begins in the text.
        one_call: Whether nothing is read after the first call.
    """

    def __init__(self, syntax: CallSyntax, tools: Collection[str], at: int, *, one_call: bool) -> None:
        self._syntax = syntax
        self._tools = tools
        self._one_call = one_call
        self.at = at
        """Where what has not been understood yet begins."""
        self._begin = at
        """Where the arguments begin that are being read, or the rest of the object around them."""
        self._value: ObjectEnd | None = None
        """The end of the arguments that are being read."""
        self._rest: ObjectEnd | None = None
        """The end of the object around a call whose arguments have been read."""
        self._whole: ObjectEnd | None = None
        """The end of an object that is shown once it is whole, if it is a call."""
        self._whole_at = at
        self._is_headless = False
        """Whether no call begins as it should in as much text as that may take."""
        self.num_calls = 0
        self.num_complete = 0
        """Of these calls, how many have been read to their end."""
        self.has_broken = False
        """Whether the arguments of any are no JSON object, or there are more of them than were shown."""
        self.is_within_call = False
        """Whether the text ends in what is a call, or may become one."""
        self.is_refused = False
        """Whether what begins at `at` is no call of one of the tools."""

    def read(self, text: str) -> list[CallPiece]:
        """Read the text, which begins with that of before; returns what is new of calls."""
        pieces: list[CallPiece] = []
        while not (self.is_refused or self._is_over) and self._advance(text, pieces):
            pass
        return pieces

    @property
    def _is_over(self) -> bool:
        return self._one_call and self.num_complete > 0

    def end(self, text: str, until: int, mark: str | None) -> list[CallPiece]:
        """No call begins before `until`, where the mark is that ends the region, if there is one yet.

        Sets `is_refused` for text that is no call, and for a region without any. Returns what is new.
        """
        self.is_refused = bool(text[self.at : until].strip()) or (mark is not None and not self.num_calls)
        return []

    def finish(self, text: str) -> list[CallPiece]:
        """No more text will come, and the region has not ended.

        Sets `has_broken` if it ends within a call, and `is_refused` if that one has not been shown. Returns
        what is new of calls.
        """
        is_shown = self._value is not None or self._rest is not None
        self.is_refused = not is_shown and (self.is_within_call or not self.num_calls)
        self.has_broken |= self._value is not None or self.is_refused
        return []

    def _advance(self, text: str, pieces: list[CallPiece]) -> bool:
        """Understand one more part of the text. Returns whether there may be another."""
        if self._value is not None:
            return self._read_arguments(text, self._value, pieces)
        if self._rest is not None:
            return self._read_rest(text, self._rest)
        return self._begin_call(text, pieces)

    def _read_arguments(self, text: str, value: ObjectEnd, pieces: list[CallPiece]) -> bool:
        end = value.find(text, self.at)
        if end > self.at:
            pieces.append(CallPiece(None, text[self.at : end]))
        self.at = end
        if value.depth:
            return False
        self._value = None
        self.has_broken |= not is_json_object(text[self._begin : end])
        if self._syntax.in_object:
            # `{"name": …, "arguments": {…}` has its own end yet to come.
            self._begin, self._rest = end, ObjectEnd(1)
        else:
            self._complete()
        return True

    def _read_rest(self, text: str, rest: ObjectEnd) -> bool:
        self.at = rest.find(text, self.at)
        if rest.depth:
            return False
        self._rest = None
        members = text[self._begin : self.at].strip(_AROUND_MEMBERS)
        given = _members(f"{{{members}}}")
        self.has_broken |= given is None or not given.keys() <= _DESCRIPTIVE
        self._complete()
        return True

    def _complete(self) -> None:
        self.num_complete += 1
        self.is_within_call = self._is_headless = False

    def _begin_call(self, text: str, pieces: list[CallPiece]) -> bool:
        if self.num_calls:
            between = _BETWEEN.match(text, self.at)
            assert between is not None
            self.at = between.end()
            if not self._syntax.parallel:
                self.is_refused = self.at < len(text)
                return False
        # Looked for again with each token, a head without a bound would cost its square.
        head = None if self._is_headless else self._syntax.head.match(text, self.at, self.at + MAX_HEAD_CHARS)
        if head is not None:
            self.is_within_call = True
            return self._open(_name(head["name"]), head.end(), pieces)
        self._is_headless = len(text) - self.at >= MAX_HEAD_CHARS
        if self._whole is None and not self._may_begin(text):
            return False
        return self._syntax.in_object and self._read_whole(text, pieces)

    def _may_begin(self, text: str) -> bool:
        """Whether the text may be the beginning of a call, or nothing yet. Sets `is_within_call`."""
        opening = self._syntax.opening.match(text, self.at)
        self.is_within_call = opening is not None and self.at < len(text)
        self.is_refused = self.is_within_call and self._is_headless and not self._syntax.in_object
        return self.is_within_call and text.find("{", self.at) >= 0

    def _open(self, name: str, at: int, pieces: list[CallPiece]) -> bool:
        """Begin a call whose arguments begin at `at`."""
        self.is_refused = name not in self._tools
        if self.is_refused:
            return False
        self.num_calls += 1
        self._value, self._begin, self.at, self._whole = ObjectEnd(0), at, at, None
        pieces.append(CallPiece(name, ""))
        return True

    def _read_whole(self, text: str, pieces: list[CallPiece]) -> bool:
        """Read an object that does not begin as a call does: its members may have another order."""
        if self._whole is None:
            self._whole, self._whole_at = ObjectEnd(0), text.index("{", self.at)
        self._whole_at = self._whole.find(text, self._whole_at)
        if self._whole.depth and not self._whole.is_broken:
            return False
        written = text[text.index("{", self.at) : self._whole_at]
        call = None if self._whole.is_broken else call_piece(written)
        self._whole = None
        self.is_refused = call is None or call.name not in self._tools
        if call is None or self.is_refused:
            return False
        self.num_calls += 1
        self.at = self._whole_at
        pieces.append(call)
        self._complete()
        return True


def call_piece(text: str) -> CallPiece | None:
    """Return a call that is written as a JSON object with `name` and arguments; None if it is none.

    A call may have no arguments at all. One that has something under another name is none: it would be lost.
    """
    members = _members(text)
    if members is None:
        return None
    given = [member for member in _ARGUMENTS if member in members]
    if len(given) > 1 or members.keys() - _DESCRIPTIVE.union(given):
        return None
    try:
        name = msgspec.json.decode(members.get("name", _NULL), type=str)
        arguments = bytes(members[given[0]]).decode() if given else "{}"
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str) or "{}"
    except NOT_JSON:
        return None
    if arguments == "null":
        arguments = "{}"
    return CallPiece(name, arguments) if is_json_object(arguments) else None


def is_json_object(text: str) -> bool:
    """Whether a text is a JSON object, as arguments must be, with no number that a double cannot hold."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except NOT_JSON:
        return False
    return True


def _members(text: str) -> dict[str, Raw] | None:
    """Return the members of a JSON object that are not null; None if the text is none."""
    try:
        members = msgspec.json.decode(text, type=dict[str, Raw])
    except NOT_JSON:
        return None
    return {name: value for name, value in members.items() if value != _NULL}


def _name(spelled: str) -> str:
    """Read a name, which is a JSON string in some syntaxes."""
    if not spelled.startswith('"'):
        return spelled
    try:
        return msgspec.json.decode(spelled, type=str)
    except NOT_JSON:
        return ""


class ObjectEnd:
    """Looks for the end of a JSON object through pieces of text, `depth` objects or arrays deep.

    One that lacks a brace ends before a tag.
    """

    _MARK = re.compile(r'["{}\[\]<]')
    _STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
    _HALF_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.is_broken = False
        """Whether it is no JSON: a string has a line break, or there is a tag outside of strings."""
        self._in_string = False

    def find(self, text: str, at: int) -> int:
        """Return where the object ends, or the end of the text that has been looked at, before that."""
        while True:
            if self._in_string:
                string = self._STRING.match(text, at)
                half = string or self._HALF_STRING.match(text, at)
                assert half is not None
                self.is_broken |= "\n" in half[0]
                if string is None:
                    return half.end()  # a lone backslash waits for what it escapes
                self._in_string, at = False, string.end()
            mark = self._MARK.search(text, at)
            if mark is None:
                return len(text)
            if mark[0] == "<":
                self.depth, self.is_broken = 0, True
                return mark.start()
            at = mark.end()
            if mark[0] == '"':
                self._in_string = True
            else:
                self.depth += 1 if mark[0] in "{[" else -1
                if self.depth <= 0:
                    self.depth = 0
                    return at
