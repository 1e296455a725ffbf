# SPDX-License-Identifier: Apache-2.0
"""The chat that another API's request is translated to: its body decoded, the chat's answer read; pure.

`messages` and `responses` are the translations. Source of the chat's shape: OpenAI's API reference; engines
name the text of their reasoning `reasoning_content` (SGLang, vLLM up to 0.11) or `reasoning` (later vLLM).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from kvferry.common.exceptions import NOT_JSON
from kvferry.common.json_errors import check_utf8
from kvferry.common.options import did_you_mean
from kvferry.proxy import sse
from kvferry.proxy.errors import BadResponse, InvalidRequest

MAX_OBJECTS = 16384
"""Of a body. Decoding makes them all in one call, during which no other thread runs."""
MAX_COMMAS = 65536
"""Of a body, likewise: between the elements of its lists and the members of its objects."""
_PIECE_BYTES = 64 * 1024
_LONGEST_NAME = 64
"""Of an unknown field that is compared with the known ones."""
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_NOT_GIVEN = (b"", b"null")
_NULL = Raw(b"null")


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a body that is to be translated: what is not known cannot be, and is refused."""


S = TypeVar("S", bound=StrictStruct)


def decode_body(raw: bytes, body: type[S], repeated: str) -> S:
    """Decode a request's body; `repeated` is the field that may have many objects.

    Raises `InvalidRequest`, with the name of a field that is unknown or wrong.
    """
    if raw.count(b"{") > MAX_OBJECTS or raw.count(b",") > MAX_COMMAS:
        _check_structure(raw, repeated)
    try:
        check_utf8(raw)
    except UnicodeError as error:
        raise InvalidRequest.of_json(error) from error
    return decode_part(raw, body)


def _check_structure(raw: bytes, repeated: str) -> None:
    """Raise `InvalidRequest` for too many objects or elements. Braces and commas in texts are none."""
    objects = commas = 0
    for outside in _outside_strings(raw):
        objects += outside.count(b"{")
        commas += outside.count(b",")
        if objects > MAX_OBJECTS:
            raise InvalidRequest(f"the body may have at most {MAX_OBJECTS} objects", param=repeated)
        if commas > MAX_COMMAS:
            raise InvalidRequest(f"the body may have at most {MAX_COMMAS} elements", param=repeated)


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """Yield what of a JSON text is not within its strings, piece by piece: other threads run in between."""
    start, is_in_string = 0, False
    while start < len(raw):
        piece = raw[start : start + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = raw[start : start + _PIECE_BYTES + 1]  # what is escaped belongs to its backslash
        start += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[int(is_in_string) :: 2])
        is_in_string ^= len(parts) % 2 == 0


def decode_part(raw: bytes | Raw, part: type[S], where: str = "") -> S:
    """Decode a body or, if `where` says its place, an object of one. Raises `InvalidRequest`."""
    try:
        return msgspec.json.decode(raw, type=part)
    except NOT_JSON as error:
        hint = _hint(str(error), part.__struct_encode_fields__)
        raise InvalidRequest.of_json(error, where, hint) from error


def _hint(error: str, known: tuple[str, ...]) -> str:
    """Say which field may have been meant by an unknown one of the outermost object."""
    unknown = _UNKNOWN.search(error)
    if unknown is None or "`$." in error or len(unknown[1]) > _LONGEST_NAME:
        return ""
    return did_you_mean(unknown[1], known)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ChatToolCall(msgspec.Struct):
    """A call, or a piece of one: `index` says which of a stream."""

    index: int = 0
    id: str | None = None
    function: _Function | None = None

    @property
    def name(self) -> str | None:
        return None if self.function is None else self.function.name

    @property
    def arguments(self) -> str:
        return (self.function.arguments if self.function is not None else None) or ""

    @property
    def given(self) -> str:
        """The arguments of a whole call."""
        return self.arguments or "{}"

    @property
    def is_whole(self) -> bool:
        return are_arguments(self.given)

    @property
    def text(self) -> str:
        """The text of a call that is not whole."""
        return cut_call(self.name or "", self.arguments)


def are_arguments(text: str) -> bool:
    """Whether a text is what a call must have: a JSON object, with no number that a double cannot hold.

    A call that was cut off has less.
    """
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except NOT_JSON:
        return False
    return True


def cut_call(name: str, arguments: str) -> str:
    """The text of a call that was cut off, which is none."""
    return f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}'


class ChatContent(msgspec.Struct):
    """A chat's message, or a stream's delta."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatToolCall] | None = None

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    def calls(self, opened: str | int | None) -> tuple[list[ChatToolCall], list[ChatToolCall]]:
        """Pieces of the call that is open, which come before a delta's text, and those after it."""
        calls = self.tool_calls or []
        going_on = [call for call in calls if call.index == opened and not call.name]
        return going_on, [call for call in calls if call not in going_on]


class ChatLogprobs(msgspec.Struct):
    content: list[Raw] | None = None


class ChatChoice(msgspec.Struct):
    message: ChatContent | None = None
    delta: ChatContent | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    """The same as SGLang names it."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens if details is not None else None) or 0

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details is not None else None) or 0


class Chat(msgspec.Struct):
    """A chat's answer, or an event of its stream."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: Raw = _NULL

    @property
    def key(self) -> str:
        """What the ids of a translated answer are made of."""
        return self.id.removeprefix("chatcmpl-")


class ChatFailure(msgspec.Struct):
    """The error of a chat, in OpenAI's shape: `type` and `code` as in `proxy.errors`, or the agent's own."""

    message: str = "the agent failed"
    type: str | None = None
    code: str | int | None = None


class ChatEnd(msgspec.Struct):
    """The end of a chat's stream, `[DONE]`."""


_CHAT = msgspec.json.Decoder(Chat)


def read_answer(body: bytes) -> tuple[Chat, ChatChoice]:
    """Decode an answer that is not streamed, of one choice. Raises `BadResponse`."""
    try:
        chat = _CHAT.decode(body)
        (choice,) = chat.choices
    except (ValueError, *NOT_JSON) as error:
        raise BadResponse.of_json(error, "an agent's answer") from error
    for index, call in enumerate((choice.message and choice.message.tool_calls) or ()):
        call.index = index  # which only streams have
    return chat, choice


class StreamRewriter(ABC):
    """Rewrites a chat's stream: its chunks, then its end or a failure, after which nothing comes."""

    def __init__(self) -> None:
        self._failed = False

    def events(self, events: bytes) -> bytes:
        """Rewrite whole events of the chat's stream; the result may be empty. Raises `BadResponse`."""
        return b"".join(self._rewritten(events))

    def _rewritten(self, events: bytes) -> Iterator[bytes]:
        for event in read_events(events):
            match event:
                case ChatEnd():
                    if not self._failed:
                        yield from self._end()
                case ChatFailure():
                    self._failed = True
                    yield from self._fail(event)
                case Chat():
                    yield from self._rewrite(event)

    @abstractmethod
    def _rewrite(self, event: Chat) -> Iterator[bytes]: ...

    @abstractmethod
    def _end(self) -> Iterator[bytes]: ...

    @abstractmethod
    def _fail(self, failure: ChatFailure) -> Iterator[bytes]: ...


def read_events(events: bytes) -> Iterator[Chat | ChatFailure | ChatEnd]:
    """Decode whole events of a stream, comments left out. Raises `BadResponse`."""
    for event in sse.split(events):
        if event == sse.DONE:
            yield ChatEnd()
        elif event.startswith(b"data:"):
            data = event.removeprefix(b"data:").strip()
            try:
                chat = _CHAT.decode(data)
            except NOT_JSON as error:
                raise BadResponse.of_json(error, "an agent's event") from error
            yield chat if bytes(chat.error) in _NOT_GIVEN else failure(data)


def failure(body: bytes) -> ChatFailure:
    """Read an error in OpenAI's format."""
    try:
        return msgspec.json.decode(body, type=_Failed).error
    except NOT_JSON:
        return ChatFailure()


class _Failed(msgspec.Struct):
    error: ChatFailure


def event(name: str, data: dict[str, Any]) -> bytes:
    """Encode one event that has a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
