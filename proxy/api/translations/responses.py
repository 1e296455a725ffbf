# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/responses`, as a chat: its requests, answers and streams rewritten; pure.

Source: https://platform.openai.com/docs/api-reference/responses and the types of the `openai` package 3.54.

Nothing is stored, so what needs an earlier response is refused. So is every other field that cannot be
honoured, by its name; docs/responses.md lists what is without effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, field

from kvferry.common.exceptions import NOT_JSON
from kvferry.proxy.api.translations import chat
from kvferry.proxy.api.translations.response_items import ResponseItems
from kvferry.proxy.errors import InvalidRequest

PATH = "/v1/responses"
_NULL = Raw(b"null")
_ASKS_FOR_NOTHING = (b"null", b"false", b"[]", b'"disabled"')
_REFUSED = {
    "access_programs": "there are no such programs",
    "background": "a response is answered at once or streamed",
    "context_management": "the input is not compacted",
    "conversation": "nothing is stored: send the earlier items as input",
    "moderation": "answers are not moderated",
    "previous_response_id": "nothing is stored: send the earlier items as input",
    "prompt": "no prompts are stored",
    "store": "nothing is stored: leave it out or send false",
    "truncation": "the input is never truncated",
}
"""Why each is refused, where it asks for anything."""
_PASSED_ON = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "temperature",
    "top_k",
    "top_p",
)
"""They mean what they mean in a chat; those that OpenAI does not define are vLLM's and SGLang's."""
_LOGPROBS = "message.output_text.logprobs"
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FAILURES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
_Status = Literal["in_progress", "completed", "incomplete"]


class _InputText(chat.StrictStruct, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Raw = _NULL


class _OutputText(chat.StrictStruct, tag_field="type", tag="output_text"):
    text: str
    annotations: Raw = _NULL
    logprobs: Raw = _NULL


class _Refusal(chat.StrictStruct, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class _SummaryText(chat.StrictStruct, tag_field="type", tag="summary_text"):
    text: str


class _ReasoningText(chat.StrictStruct, tag_field="type", tag="reasoning_text"):
    text: str


class _Item(chat.StrictStruct):
    """What all items of an input have."""

    type: str | None = None
    id: str | None = None
    status: _Status | None = None


class _Message(_Item, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_InputText | _OutputText | _Refusal]
    phase: str | None = None


class _FunctionCall(_Item, kw_only=True):
    call_id: str
    name: str
    arguments: str
    is_async: None = field(name="async", default=None)
    caller: None = None
    namespace: None = None


class _FunctionCallOutput(_Item, kw_only=True):
    call_id: str
    output: str | list[_InputText]
    name: str | None = None
    caller: None = None
    namespace: None = None


class _Reasoning(_Item, kw_only=True):
    summary: list[_SummaryText] | None = None
    content: list[_ReasoningText] | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
    "reasoning": _Reasoning,
}


class _Kind(msgspec.Struct):
    type: str | None = None


class _Tool(chat.StrictStruct, tag_field="type", tag="function"):
    name: str
    parameters: Raw = _NULL
    strict: bool | None = None
    description: str | None = None


class _Named(chat.StrictStruct, tag_field="type", tag="function"):
    """A choice of one function, or one of those that are allowed."""

    name: str


class _Allowed(chat.StrictStruct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[_Named]


class _PlainText(chat.StrictStruct, tag_field="type", tag="text"):
    pass


class _JsonObject(chat.StrictStruct, tag_field="type", tag="json_object"):
    pass


class _JsonSchema(chat.StrictStruct, tag_field="type", tag="json_schema"):
    name: str
    schema: Raw
    description: str | None = None
    strict: bool | None = None


class _TextConfig(chat.StrictStruct):
    format: _PlainText | _JsonObject | _JsonSchema | None = None
    verbosity: str | None = None


class _ReasoningConfig(chat.StrictStruct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class _StreamOptions(chat.StrictStruct):
    include_obfuscation: bool | None = None


class _PromptCacheOptions(chat.StrictStruct):
    mode: str | None = None
    ttl: str | None = None
    prewarm: Literal[False] | None = None
    comparison_response_id: None = None


_Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponsesRequest(chat.StrictStruct, kw_only=True):
    """A body of `/v1/responses`."""

    model: str
    input: str | list[Raw]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[_Includable] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Named | _Allowed | None = None
    parallel_tool_calls: bool | None = None
    text: _TextConfig | None = None
    reasoning: _ReasoningConfig | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)] | None = None

    cache_salt: Raw = _NULL
    chat_template_kwargs: Raw = _NULL
    frequency_penalty: Raw = _NULL
    ignore_eos: Raw = _NULL
    min_p: Raw = _NULL
    min_tokens: Raw = _NULL
    presence_penalty: Raw = _NULL
    repetition_penalty: Raw = _NULL
    seed: Raw = _NULL
    stop: Raw = _NULL
    top_k: Raw = _NULL

    image: Raw = _NULL
    max_tool_calls: Raw = _NULL
    prompt_cache_key: Raw = _NULL
    prompt_cache_options: _PromptCacheOptions | None = None
    prompt_cache_retention: Raw = _NULL
    safety_identifier: Raw = _NULL
    service_tier: Raw = _NULL
    user: Raw = _NULL

    access_programs: Raw = _NULL
    background: Raw = _NULL
    context_management: Raw = _NULL
    conversation: Raw = _NULL
    moderation: Raw = _NULL
    previous_response_id: Raw = _NULL
    prompt: Raw = _NULL
    store: Raw = _NULL
    truncation: Raw = _NULL


def parse(raw: bytes) -> ResponsesRequest:
    """Decode a body. Raises `InvalidRequest`, which names a field that is wrong or cannot be honoured."""
    request = chat.decode_body(raw, ResponsesRequest, "input")
    for name, reason in _REFUSED.items():
        if bytes(getattr(request, name)) not in _ASKS_FOR_NOTHING:
            raise InvalidRequest(f"{name}: {reason}", param=name)
    return request


def chat_request(request: ResponsesRequest) -> bytes:
    """Write the request as a body of `/v1/chat/completions`. Raises `InvalidRequest`."""
    body: dict[str, Any] = {
        "model": request.model,
        "messages": _chat_messages(request),
        "stream": bool(request.stream),
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    given = {
        "max_tokens": request.max_output_tokens,
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "verbosity": _verbosity(request.text),
        **{name: getattr(request, name) for name in _PASSED_ON},
    }
    body |= {name: value for name, value in given.items() if value is not None and value != _NULL}
    if "reasoning_effort" in body:
        body["kvferry_hints"] = ["reasoning_effort"]  # clients send an effort to every model
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return msgspec.json.encode(body | _tools(request))


def _chat_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The chat. All that a model said between two messages of others is one message of the assistant's."""
    given = request.input
    messages = _Conversation(request.instructions)
    if isinstance(given, str):
        messages.add_message("user", given)
        return messages.chat
    if not given:
        raise InvalidRequest("input: there must be an item", param="input")
    for index, raw in enumerate(given):
        match _item(raw, f"input[{index}]"):
            case _Message() as message:
                messages.add_message(message.role, _joined(message.content))
            case _FunctionCall() as call:
                messages.add_call(call)
            case _FunctionCallOutput() as result:
                messages.add_result(result)
            case _Reasoning() as reasoning:
                messages.add_thoughts(_joined(reasoning.content or []))
    return messages.chat


def _item(raw: Raw, where: str) -> _Item:
    """Decode one item of the input. Raises `InvalidRequest`."""
    try:
        kind = msgspec.json.decode(raw, type=_Kind).type or "message"
    except NOT_JSON as error:
        raise InvalidRequest.of_json(error, where) from error
    if kind not in _ITEMS:
        reason = "nothing is stored" if kind == "item_reference" else f"only {', '.join(_ITEMS)} are"
        raise InvalidRequest(f"{where}: {kind[:64]} is not supported: {reason}", param=where)
    return chat.decode_part(raw, _ITEMS[kind], where)


class _Conversation:
    """A chat that is put together item by item."""

    def __init__(self, instructions: str | None) -> None:
        self.chat: list[dict[str, Any]] = []
        self._thoughts = ""
        """Reasoning that belongs to what the assistant says next."""
        if instructions:
            self.add_message("system", instructions)

    def add_message(self, role: str, text: str) -> None:
        """Add a message. The developer's are the system's to chat templates, which take one, at the start."""
        if role == "assistant":
            self._assistant(opens=True)["content"] = text
            return
        self._end_turn()
        role = "system" if role == "developer" else role
        if role == "system" and len(self.chat) == 1 and self.chat[0]["role"] == "system":
            self.chat[0]["content"] += f"\n\n{text}"
        else:
            self.chat.append({"role": role, "content": text})

    def add_call(self, call: _FunctionCall) -> None:
        """Add a call. One that was cut off is none for any chat template, so its text is content."""
        if not chat.are_arguments(call.arguments or "{}"):
            message = self._assistant(opens=False)
            cut = chat.cut_call(call.name, call.arguments)
            message["content"] = "\n".join(filter(None, (message.get("content"), cut)))
            return
        made = {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self._assistant(opens=False).setdefault("tool_calls", []).append(made)

    def add_result(self, result: _FunctionCallOutput) -> None:
        self._end_turn()
        message = {"role": "tool", "tool_call_id": result.call_id, "content": _joined(result.output)}
        self.chat.append(message)

    def add_thoughts(self, text: str) -> None:
        self._thoughts = "\n".join(filter(None, (self._thoughts, text)))

    def _end_turn(self) -> None:
        """Another role speaks: what the assistant thought before is all of its message."""
        if self._thoughts:
            self._assistant(opens=True)["content"] = ""

    def _assistant(self, *, opens: bool) -> dict[str, Any]:
        """The assistant's message that the next item belongs to: a new one, or the last if that is theirs."""
        if opens or not self.chat or self.chat[-1]["role"] != "assistant":
            self.chat.append({"role": "assistant"})
        message = self.chat[-1]
        if self._thoughts:
            earlier = message.get("reasoning_content")
            message["reasoning_content"] = f"{earlier}\n{self._thoughts}" if earlier else self._thoughts
            self._thoughts = ""
        return message


def _joined(parts: str | list[Any]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)


def _response_format(text: _TextConfig | None) -> dict[str, Any] | None:
    match text.format if text is not None else None:
        case _JsonObject():
            return {"type": "json_object"}
        case _JsonSchema() as wanted:
            return {"type": "json_schema", "json_schema": _without_nulls(wanted)}
    return None


def _verbosity(text: _TextConfig | None) -> str | None:
    return None if text is None or text.verbosity == "medium" else text.verbosity


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a chat that say which tools may, or must, be called. Raises `InvalidRequest`."""
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, _Allowed | _Named):
        names = {tool.name for tool in tools}
        wanted = choice.tools if isinstance(choice, _Allowed) else [choice]
        for tool in wanted:
            if tool.name not in names:
                message = f"tool_choice: there is no function {tool.name[:64]!r}"
                raise InvalidRequest(message, param="tool_choice")
    if isinstance(choice, _Allowed):
        allowed = {tool.name for tool in choice.tools}
        tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
    if not tools:
        if choice == "required":
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return {}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": _without_nulls(tool)} for tool in tools]
    }
    if choice is not None:
        fields["tool_choice"] = choice if isinstance(choice, str) else _chat_choice(choice)
    if request.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def _chat_choice(choice: _Named) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _without_nulls(part: _Tool | _JsonSchema) -> dict[str, Any]:
    values = {name: getattr(part, name) for name in part.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None and value != _NULL}


class ResponsesRewriter(chat.StreamRewriter):
    """Rewrites one request and the chat's answer to it: whole, or a stream event by event.

    A stream holds its whole answer, since its last events repeat it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeated: dict[str, Any] = {}
        """Of the request: what the response repeats."""
        self._head = chat.Chat()
        self._usage: chat.ChatUsage | None = None
        self._output = ResponseItems("")
        self._finish_reason: str | None = None
        self._sequence = 0
        self._begun = False

    def chat_request(self, raw: bytes) -> bytes:
        """Rewrite a body, for which it is called once, before all else. Raises `InvalidRequest`."""
        request = parse(raw)
        self._repeated = _repeated(request)
        return chat_request(request)

    def whole(self, body: bytes) -> bytes:
        """Rewrite an answer that is not streamed. Raises `BadResponse`."""
        answer, choice = chat.read_answer(body)
        self._begin(answer)
        self._usage, self._finish_reason = answer.usage, choice.finish_reason
        list(self._output.add(choice.message or chat.ChatContent(), choice.logprobs))
        list(self._output.end(self._status))
        return msgspec.json.encode(self._response(self._status))

    def _rewrite(self, event: chat.Chat) -> Iterator[bytes]:
        yield from self._created(event)
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
            for name, fields in self._output.add(choice.delta or chat.ChatContent(), choice.logprobs):
                yield self._event(name, **fields)

    def _created(self, event: chat.Chat) -> Iterator[bytes]:
        if not self._begun:
            self._begin(event)
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._response("in_progress"))

    def _begin(self, answer: chat.Chat) -> None:
        self._begun, self._head, self._output = True, answer, ResponseItems(answer.key)

    def _end(self) -> Iterator[bytes]:
        yield from self._created(self._head)
        for name, fields in self._output.end(self._status):
            yield self._event(name, **fields)
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def _fail(self, failure: chat.ChatFailure) -> Iterator[bytes]:
        yield from self._created(self._head)
        if self._output.items:
            self._output.fill("incomplete")
        kind = _FAILURES.get(failure.type or "", "server_error")
        error = {"code": kind, "message": failure.message, "type": failure.code}
        yield self._event("response.failed", response=self._response("failed", error))

    @property
    def _status(self) -> str:
        is_incomplete = self._finish_reason in _INCOMPLETE or self._output.has_cut_call
        return "incomplete" if is_incomplete else "completed"

    def _event(self, name: str, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return chat.event(name, data)

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        reason = _INCOMPLETE.get(self._finish_reason or "") if status == "incomplete" else None
        return {
            "id": f"resp_{self._head.key}",
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._head.model,
            "output": self._output.items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if status == "in_progress" or self._usage is None else _token_counts(self._usage),
            **self._repeated,
        }


def _repeated(request: ResponsesRequest) -> dict[str, Any]:
    text = request.text or _TextConfig()
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "temperature": request.temperature,
        "text": {"format": text.format or _PlainText(), "verbosity": text.verbosity or "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [
            {"type": "function", "parameters": None, "strict": None} | _without_nulls(tool)
            for tool in request.tools or ()
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
    }


def _token_counts(usage: chat.ChatUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
