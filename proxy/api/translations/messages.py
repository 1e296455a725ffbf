# SPDX-License-Identifier: Apache-2.0
"""Anthropic's `/v1/messages`, as a chat: its requests, answers, streams and errors rewritten; pure.

Source: https://docs.anthropic.com/en/api/messages and the types of the `anthropic` package 2.12.

A field that cannot be honoured is refused by its name. What is only a hint has no effect (`_Hints`,
`cache_control`: agents cache every prefix), nor has thinking of earlier turns. An agent that does not say
which stop sequence ended an answer leaves `end_turn` as its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, field

from kvferry.common.exceptions import NOT_JSON
from kvferry.common.http.server import openai_error
from kvferry.proxy.api.translations import chat
from kvferry.proxy.api.translations.response_items import MAX_HELD_BYTES
from kvferry.proxy.errors import BadResponse, InvalidRequest, ProxyError

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
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


class _Text(chat.StrictStruct, tag_field="type", tag="text"):
    text: str
    cache_control: Raw = field(default_factory=Raw)
    citations: Raw = field(default_factory=Raw)


class _ToolUse(chat.StrictStruct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw
    cache_control: Raw = field(default_factory=Raw)
    caller: Raw = field(default_factory=Raw)
    toolset_name: Raw = field(default_factory=Raw)


class _ToolResult(chat.StrictStruct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None
    cache_control: Raw = field(default_factory=Raw)
    toolset_name: Raw = field(default_factory=Raw)


class _Thinking(chat.StrictStruct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class _RedactedThinking(chat.StrictStruct, tag_field="type", tag="redacted_thinking"):
    data: str


class _Message(chat.StrictStruct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Text | _ToolUse | _ToolResult | _Thinking | _RedactedThinking]


class _Tool(chat.StrictStruct):
    name: str
    input_schema: Raw
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    allowed_callers: Raw = field(default_factory=Raw)
    cache_control: Raw = field(default_factory=Raw)
    defer_loading: Raw = field(default_factory=Raw)
    eager_input_streaming: Raw = field(default_factory=Raw)
    input_examples: Raw = field(default_factory=Raw)


class _ToolChoice(chat.StrictStruct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingConfig(chat.StrictStruct):
    """Whether a model reasons is up to itself and its chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Raw = field(default_factory=Raw)
    display: Raw = field(default_factory=Raw)


class _Format(chat.StrictStruct):
    type: Literal["json_schema"]
    schema: Raw


class _OutputConfig(chat.StrictStruct):
    format: _Format | None = None
    effort: Raw = field(default_factory=Raw)
    task_budget: Raw = field(default_factory=Raw)


class _Hints(chat.StrictStruct, kw_only=True):
    """Fields without effect."""

    cache_control: Raw = field(default_factory=Raw)
    context_management: Raw = field(default_factory=Raw)
    diagnostics: Raw = field(default_factory=Raw)
    inference_geo: Raw = field(default_factory=Raw)
    metadata: Raw = field(default_factory=Raw)
    service_tier: Raw = field(default_factory=Raw)
    speed: Raw = field(default_factory=Raw)


class PromptRequest(_Hints, kw_only=True):
    """A body of `/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None


class MessagesRequest(PromptRequest, kw_only=True):
    """A body of `/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]
    container: None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None


def chat_request(raw: bytes) -> bytes:
    """Rewrite a body of `/v1/messages` as one of `/v1/chat/completions`.

    Raises `InvalidRequest`, with the name of a field that is wrong or cannot be honoured.
    """
    request = chat.decode_body(raw, MessagesRequest, "messages")
    body = {"max_tokens": request.max_tokens, "stream": bool(request.stream), **_chat_prompt(request)}
    if request.stream:
        # The stream begins with the prompt's tokens, where an agent reports them so early.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if request.output_config is not None and request.output_config.format is not None:
        wanted = {"name": "output", "schema": request.output_config.format.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    for name, value in (
        ("stop", request.stop_sequences),
        ("temperature", request.temperature),
        ("top_k", request.top_k),
        ("top_p", request.top_p),
    ):
        if value is not None:
            body[name] = value
    if request.tools:
        body |= _tool_choice(request.tool_choice)
    elif request.tool_choice is not None and request.tool_choice.type not in ("auto", "none"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    return msgspec.json.encode(body)


def tokenize_request(raw: bytes) -> bytes:
    """Rewrite a body of `/v1/messages/count_tokens` as one of `/tokenize`. Raises `InvalidRequest`."""
    request = chat.decode_body(raw, PromptRequest, "messages")
    prompt = _chat_prompt(request)
    if request.tool_choice is not None and request.tool_choice.type == "none":
        prompt.pop("tools", None)
    return msgspec.json.encode(prompt)


def token_count(answer: bytes) -> bytes:
    """Rewrite an answer of `/tokenize` as one of `/v1/messages/count_tokens`. Raises `BadResponse`."""
    try:
        count = msgspec.json.decode(answer, type=_Tokenized).count
    except NOT_JSON as error:
        raise BadResponse.of_json(error, "an agent's count of tokens") from error
    return msgspec.json.encode({"input_tokens": count})


class _Tokenized(msgspec.Struct):
    count: int


def _chat_prompt(request: PromptRequest) -> dict[str, Any]:
    """The fields of a chat that its prompt is made of."""
    prompt: dict[str, Any] = {"model": request.model, "messages": list(_chat_messages(request))}
    if request.messages[-1].role == "assistant":
        prompt |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        prompt["tools"] = [_chat_tool(tool) for tool in request.tools]
    return prompt


def _chat_messages(request: PromptRequest) -> Iterator[dict[str, Any]]:
    """The chat. Its system messages become one, at the front: many chat templates take no other."""
    others = [message for message in request.messages if message.role == "system"]
    texts = [text for text in (_joined(request.system), *map(_system_text, others)) if text]
    if texts:
        yield {"role": "system", "content": "\n\n".join(texts)}
    for message in request.messages:
        if message.role == "system":
            continue
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "user":
            yield from _user_messages(message.content)
        else:
            yield _assistant_message(message.content)


def _system_text(message: _Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = [block for block in message.content if isinstance(block, _Text)]
    if len(texts) < len(message.content):
        raise InvalidRequest("a system message has texts only", param="messages")
    return _joined(texts)


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
    if any(not bytes(call.input).startswith(b"{") for call in calls):
        raise InvalidRequest("the input of a tool_use must be an object", param="messages")
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
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
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


def _joined(texts: str | list[_Text] | None) -> str:
    return texts if isinstance(texts, str) else "\n".join(block.text for block in texts or ())


def error_body(error: ProxyError) -> bytes:
    """The body of an error."""
    kind = _ERROR_TYPES.get(error.status, error.kind if error.status < 500 else "api_error")
    return msgspec.json.encode(_error(kind, chat.failure(error.body()).message))


def connection_error(target: bytes, status: int, code: str, message: str) -> bytes:
    """The body of an error of a client's connection (`ErrorBody`), for any endpoint."""
    if PATH.encode() not in target.partition(b"?")[0]:
        return openai_error(target, status, code, message)
    kind = "api_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode(_error(_ERROR_TYPES.get(status, kind), message))


class MessagesRewriter(chat.StreamRewriter):
    """Rewrites the chat's answer to one request (`Translation`): whole, or a stream event by event."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        self._usage = chat.ChatUsage()
        self._block: str | int | None = None
        """What the open content block is: text, thinking, or a tool call by its index."""
        self._num_blocks = 0
        self._stop: tuple[str, str | None] = ("end_turn", None)
        self._arguments: list[str] = []
        """Of the open call, to see whether it is whole."""
        self._held = 0
        self._has_cut_call = False

    def chat_request(self, raw: bytes) -> bytes:
        """See the function."""
        return chat_request(raw)

    def whole(self, body: bytes) -> bytes:
        """Rewrite an answer that is not streamed. Raises `BadResponse`."""
        answer, choice = chat.read_answer(body)
        blocks: list[dict[str, Any]] = []
        message = choice.message or chat.ChatContent()
        if message.thoughts:
            blocks.append({"type": "thinking", "thinking": message.thoughts, "signature": ""})
        if message.content:
            blocks.append(_text(message.content))
        # A call that was cut off has no input to run a tool with, so its text is shown.
        calls = message.tool_calls or ()
        blocks += [_tool_use(call) if call.is_whole else _text(call.text) for call in calls]
        reason, sequence = _checked(_stop(choice), all(call.is_whole for call in calls))
        return msgspec.json.encode(
            _message(answer, blocks, reason, sequence, _counts(answer.usage or chat.ChatUsage()))
        )

    def _rewrite(self, event: chat.Chat) -> Iterator[bytes]:
        if event.usage is not None:
            self._usage = event.usage
        if not self._begun:
            self._begun = True
            message = _message(event, [], None, None, _counts(self._usage) | {"output_tokens": 0})
            yield chat.event("message_start", {"type": "message_start", "message": message})
        for choice in event.choices:
            yield from self._delta(choice.delta or chat.ChatContent())
            if choice.finish_reason is not None:
                self._stop = _stop(choice)

    def _delta(self, delta: chat.ChatContent) -> Iterator[bytes]:
        going_on, new = delta.calls(self._block)
        yield from self._call_pieces(going_on)
        if delta.thoughts:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": delta.thoughts})
        if delta.content:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._piece({"type": "text_delta", "text": delta.content})
        yield from self._call_pieces(new)

    def _call_pieces(self, calls: Sequence[chat.ChatToolCall]) -> Iterator[bytes]:
        for call in calls:
            start: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._open(call.index, start)
            if call.arguments:
                self._hold(call.arguments)
                yield self._piece({"type": "input_json_delta", "partial_json": call.arguments})

    def _hold(self, arguments: str) -> None:
        self._arguments.append(arguments)
        self._held += len(arguments)
        if self._held > MAX_HELD_BYTES:
            raise BadResponse(f"an agent's answer exceeds {MAX_HELD_BYTES} bytes")

    def _open(self, block: str | int, start: dict[str, Any]) -> Iterator[bytes]:
        """Begin a content block, unless it is the open one, which ends then."""
        if block == self._block:
            return
        yield from self._close()
        self._block = block
        content = {"type": "content_block_start", "index": self._num_blocks, "content_block": start}
        yield chat.event("content_block_start", content)
        self._num_blocks += 1

    def _close(self) -> Iterator[bytes]:
        if self._block is not None:
            self._has_cut_call |= bool(self._arguments) and not chat.are_arguments("".join(self._arguments))
            self._block, self._arguments = None, []
            stop = {"type": "content_block_stop", "index": self._num_blocks - 1}
            yield chat.event("content_block_stop", stop)

    def _piece(self, delta: dict[str, Any]) -> bytes:
        index = self._num_blocks - 1
        return chat.event(
            "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        )

    def _end(self) -> Iterator[bytes]:
        yield from self._close()
        reason, sequence = _checked(self._stop, not self._has_cut_call)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _counts(self._usage)
        yield chat.event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage})
        yield chat.event("message_stop", {"type": "message_stop"})

    def _fail(self, failure: chat.ChatFailure) -> Iterator[bytes]:
        yield chat.event("error", _error("api_error", failure.message))


def _message(
    answer: chat.Chat,
    content: list[dict[str, Any]],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: dict[str, int],
) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.key}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage,
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tool_use(call: chat.ChatToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": Raw(call.given.encode())}


def _stop(choice: chat.ChatChoice) -> tuple[str, str | None]:
    """The reason that an answer ended, and the stop sequence that did it."""
    stopped_by = choice.stop_reason if choice.matched_stop is None else choice.matched_stop
    if choice.finish_reason == "stop" and isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return _STOP_REASONS.get(choice.finish_reason or "", "end_turn"), None


def _checked(stop: tuple[str, str | None], calls_are_whole: bool) -> tuple[str, str | None]:
    """Engines say that an answer calls where its call is not whole: then there is no tool to run."""
    return ("end_turn", None) if stop[0] == "tool_use" and not calls_are_whole else stop


def _counts(usage: chat.ChatUsage) -> dict[str, int]:
    """Anthropic counts cached tokens apart."""
    cached = usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
