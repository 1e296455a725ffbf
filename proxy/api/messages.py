# SPDX-License-Identifier: Apache-2.0
"""Anthropic's `/v1/messages`, as a chat: its requests, answers, streams and errors rewritten; pure.

Source: https://docs.anthropic.com/en/api/messages and the types of the `anthropic` package 2.12.

A field that cannot be honoured is refused by its name. Harmless and without effect: `metadata`,
`service_tier`, `inference_geo`, `diagnostics`, `cache_control` (agents cache every prefix), and thinking of
earlier turns. An agent that does not say which stop sequence ended an answer leaves `end_turn` as its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, field

from kvferry.proxy import sse
from kvferry.proxy.errors import NOT_JSON, BadResponse, InvalidRequest, ProxyError

PATH = "/v1/messages"
MAX_BLOCKS = 16384
"""Of objects in a body, counted by their braces."""
_NOT_GIVEN = (b"", b"null")
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    pass


class _Text(_Strict, tag_field="type", tag="text"):
    text: str
    cache_control: Raw = field(default_factory=Raw)
    citations: None = None


class _ToolUse(_Strict, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw
    cache_control: Raw = field(default_factory=Raw)


class _ToolResult(_Strict, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] = ""
    is_error: bool = False
    cache_control: Raw = field(default_factory=Raw)


class _Thinking(_Strict, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class _RedactedThinking(_Strict, tag_field="type", tag="redacted_thinking"):
    data: str


class _Message(_Strict):
    role: Literal["user", "assistant"]
    content: str | list[_Text | _ToolUse | _ToolResult | _Thinking | _RedactedThinking]


class _Tool(_Strict):
    name: str
    input_schema: Raw
    description: str = ""
    type: Literal["custom"] = "custom"
    cache_control: Raw = field(default_factory=Raw)


class _ToolChoice(_Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _NoThinking(_Strict):
    type: Literal["disabled"]


class MessagesRequest(_Strict):
    """A body of `/v1/messages`."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)]
    messages: Annotated[list[_Message], Meta(min_length=1)]
    system: str | list[_Text] = ""
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _NoThinking | None = None
    metadata: Raw = field(default_factory=Raw)
    service_tier: Raw = field(default_factory=Raw)
    inference_geo: Raw = field(default_factory=Raw)
    diagnostics: Raw = field(default_factory=Raw)
    cache_control: Raw = field(default_factory=Raw)


def chat_request(raw: bytes) -> bytes:
    """Rewrite a body of `/v1/messages` as one of `/v1/chat/completions`.

    Raises `InvalidRequest`, with the name of a field that is wrong or cannot be honoured.
    """
    if raw.count(b"{") > MAX_BLOCKS:
        raise InvalidRequest(f"the body may have at most {MAX_BLOCKS} objects", param="messages")
    try:
        request = msgspec.json.decode(raw, type=MessagesRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    except NOT_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "messages": list(_chat_messages(request)),
        "stream": request.stream,
    }
    if request.stream:
        # The stream begins with the prompt's tokens, where an agent reports them so early.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if request.messages[-1].role == "assistant":
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    for name, value in (
        ("stop", request.stop_sequences),
        ("temperature", request.temperature),
        ("top_k", request.top_k),
        ("top_p", request.top_p),
    ):
        if value is not None:
            body[name] = value
    if request.tools:
        body |= {"tools": [_chat_tool(tool) for tool in request.tools]} | _tool_choice(request.tool_choice)
    elif request.tool_choice is not None and request.tool_choice.type not in ("auto", "none"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    return msgspec.json.encode(body)


def _chat_messages(request: MessagesRequest) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _joined(request.system)}
    for message in request.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "user":
            yield from _user_messages(message.content)
        else:
            yield _assistant_message(message.content)


def _user_messages(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own, between the texts before and after them."""
    texts: list[str] = []
    for block in blocks:
        match block:
            case _Text():
                texts.append(block.text)
            case _ToolResult():
                if texts:
                    yield {"role": "user", "content": "\n".join(texts)}
                    texts = []
                result = _joined(block.content)
                yield {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": f"Error: {result}" if block.is_error else result,
                }
            case _:
                raise InvalidRequest("a user's message has texts and tool results only", param="messages")
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant_message(blocks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block.text for block in blocks if isinstance(block, _Text)]
    calls = [block for block in blocks if isinstance(block, _ToolUse)]
    if any(isinstance(block, _ToolResult) for block in blocks):
        raise InvalidRequest("an assistant's message has no tool results", param="messages")
    if texts or not calls:
        message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": bytes(call.input).decode()},
            }
            for call in calls
        ]
    return message


def _chat_tool(tool: _Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: _ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice of type tool needs a name", param="tool_choice")
        chosen = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chosen} | (
        {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    )


def _joined(texts: str | list[_Text]) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Content(msgspec.Struct):
    """A chat's message, or a stream's delta."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _ChatChoice(msgspec.Struct):
    message: _Content | None = None
    delta: _Content | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chat(msgspec.Struct):
    """A chat's answer, or an event of its stream."""

    id: str = ""
    model: str = ""
    choices: list[_ChatChoice] = []
    usage: _ChatUsage | None = None
    error: Raw = field(default_factory=Raw)


_CHAT = msgspec.json.Decoder(_Chat)


class MessagesRewriter:
    """Rewrites the chat's answer to one request (`ResponseRewriter`): whole, or a stream event by event."""

    def __init__(self) -> None:
        self._begun = self._failed = False
        self._usage = _ChatUsage()
        self._block: str | int | None = None
        """What the open content block is: text, thinking, or a tool call by its index."""
        self._num_blocks = 0
        self._stop: tuple[str, str | None] = ("end_turn", None)

    def whole(self, body: bytes) -> bytes:
        """Rewrite an answer that is not streamed. Raises `BadResponse`."""
        try:
            chat = _CHAT.decode(body)
            (choice,) = chat.choices
        except (ValueError, *NOT_JSON) as error:
            raise BadResponse(f"an agent's answer is no chat: {error}") from error
        blocks: list[dict[str, Any]] = []
        message = choice.message or _Content()
        if message.reasoning_content:
            blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for call in message.tool_calls or ():
            function = call.function or _Function()
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call.id,
                    "name": function.name,
                    "input": Raw((function.arguments or "{}").encode()),
                }
            )
        reason, sequence = _stop(choice)
        return msgspec.json.encode(
            _message(chat, blocks, reason, sequence, _counts(chat.usage or _ChatUsage()))
        )

    def events(self, events: bytes) -> bytes:
        """Rewrite whole events of the chat's stream; the result may be empty. Raises `BadResponse`."""
        return b"".join(self._rewritten(events))

    def error(self, error: ProxyError) -> bytes:
        """The body of an error."""
        return msgspec.json.encode(_error(_ERROR_TYPES.get(error.status, "api_error"), _words(error.body())))

    def _rewritten(self, events: bytes) -> Iterator[bytes]:
        for event in sse.split(events):
            if event == sse.DONE:
                if not self._failed:
                    yield from self._end()
                continue
            data = event.removeprefix(b"data:").strip()
            if not event.startswith(b"data:"):
                continue  # a comment
            try:
                chat = _CHAT.decode(data)
            except NOT_JSON as error:
                raise BadResponse(f"an agent's event is no chat's: {error}") from error
            if bytes(chat.error) not in _NOT_GIVEN:
                self._failed = True
                yield _event("error", _error("api_error", _words(data)))
                continue
            if chat.usage is not None:
                self._usage = chat.usage
            if not self._begun:
                self._begun = True
                message = _message(chat, [], None, None, _counts(self._usage) | {"output_tokens": 0})
                yield _event("message_start", {"type": "message_start", "message": message})
            for choice in chat.choices:
                yield from self._delta(choice.delta or _Content())
                if choice.finish_reason is not None:
                    self._stop = _stop(choice)

    def _delta(self, delta: _Content) -> Iterator[bytes]:
        if delta.reasoning_content:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": delta.reasoning_content})
        if delta.content:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._piece({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls or ():
            function = call.function or _Function()
            start: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": function.name, "input": {}}
            yield from self._open(call.index, start)
            if function.arguments:
                yield self._piece({"type": "input_json_delta", "partial_json": function.arguments})

    def _open(self, block: str | int, start: dict[str, Any]) -> Iterator[bytes]:
        """Begin a content block, unless it is the open one, which ends then."""
        if block == self._block:
            return
        yield from self._close()
        self._block = block
        content = {"type": "content_block_start", "index": self._num_blocks, "content_block": start}
        yield _event("content_block_start", content)
        self._num_blocks += 1

    def _close(self) -> Iterator[bytes]:
        if self._block is not None:
            self._block = None
            stop = {"type": "content_block_stop", "index": self._num_blocks - 1}
            yield _event("content_block_stop", stop)

    def _piece(self, delta: dict[str, Any]) -> bytes:
        index = self._num_blocks - 1
        return _event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})

    def _end(self) -> Iterator[bytes]:
        yield from self._close()
        reason, sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _counts(self._usage)
        yield _event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage})
        yield _event("message_stop", {"type": "message_stop"})


def _message(
    chat: _Chat,
    content: list[dict[str, Any]],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: dict[str, int],
) -> dict[str, Any]:
    return {
        "id": f"msg_{chat.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": chat.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage,
    }


def _stop(choice: _ChatChoice) -> tuple[str, str | None]:
    """The reason that an answer ended, and the stop sequence that did it."""
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return _STOP_REASONS.get(choice.finish_reason or "", "end_turn"), None


def _counts(usage: _ChatUsage) -> dict[str, int]:
    """Anthropic counts cached tokens apart."""
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details is not None else None) or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _words(body: bytes) -> str:
    """The message of an error in OpenAI's format."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*NOT_JSON, KeyError, TypeError):
        return "the agent failed"


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
