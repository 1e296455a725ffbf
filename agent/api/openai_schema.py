# SPDX-License-Identifier: Apache-2.0
"""Bodies of the OpenAI endpoints: typed, checked, and turned into a prompt and `SamplingParams`. Pure.

Every field of a body is honoured, harmless or refused by name: `agent.api.fields`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from kvferry.agent.api.fields import FieldDecoder, check_fields, field_decoder
from kvferry.agent.api.grammar.constraint import MAX_GRAMMAR_BYTES, ConstrainedBody
from kvferry.agent.api.kv_params import KVTransferParams, Resume, check_resume
from kvferry.agent.api.message.tools import MAX_TOOLS, MAX_TOOLS_BYTES, Tool, ToolChoice, ToolUse
from kvferry.agent.checkpoint import read_json
from kvferry.agent.errors import ApiError, bad_request
from kvferry.agent.ids import MAX_SEED, MIN_SEED, NO_SEED
from kvferry.agent.messages.requests import SamplingParams
from kvferry.common.exceptions import NOT_JSON
from kvferry.common.json_errors import check_utf8, explain
from kvferry.transfer.sampled_tokens import MAX_ALTERNATIVES, MAX_CHOICES

MAX_MODEL_CHARS = 1024
"""Longest name of a model: errors and logs repeat it."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
"""Most bytes of all stop strings together: each new token is compared with every beginning of them."""
MAX_LOGIT_BIASES = 300
"""As many as OpenAI takes."""
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 4096
"""Most bytes of all bad words together: each is encoded, and compared with the end of the output at each
token."""
MAX_ALLOWED_TOKEN_IDS = 65536
MAX_CACHE_SALT_CHARS = 512
MAX_TEMPLATE_CHARS = 65536
MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARGS_BYTES = 16384
MAX_OMITTED = 4
"""How many times the context the texts of a chat may be: templates leave out earlier reasoning."""
MAX_SETTING_BYTES = 64 * 1024
"""Largest `logit_bias`, `stop`, `stop_token_ids`, `bad_words` and `chat_template_kwargs`, in bytes of JSON
each."""
MAX_TOKEN_IDS_BYTES = 512 * 1024
"""Largest `allowed_token_ids`, and list of ids to detokenize, in bytes of JSON."""
MAX_TOOL_CALLS_BYTES = 256 * 1024
"""Largest `tool_calls` of one message, in bytes of JSON."""
_SMALL_BODY_BYTES = 32 * 1024
"""Decoding less than this takes no time to speak of, whatever it is."""
_OBJECTS_PER_PART = 4
"""A message or a part of one holds at most this many objects in requests that make sense."""
_NULL = Raw(b"null")
_SPACE = b" \t\r\n"
_OF_TOKEN_IDS = b"0123456789,[]" + _SPACE
# Dividing float32 logits by less than this could overflow; sampling would be greedy anyway.
_MIN_TEMPERATURE = 1e-5

Limit = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ModelName = Annotated[str, Meta(max_length=MAX_MODEL_CHARS)]
Template = Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE_CHARS)]
TemplateVariables = Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_KWARGS)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
NumAlternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]

_Body = TypeVar("_Body", bound="GenerationBody")
_Plain = TypeVar("_Plain", "TokenizeBody", "DetokenizeBody")
_Value = TypeVar("_Value", int, float)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which events a stream has. `include_obfuscation` is harmless (`agent.api.fields`)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(ConstrainedBody, frozen=True, kw_only=True):
    """What completions and chat completions have in common. A null is the same as a field left out."""

    model: ModelName
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_BAD_WORDS)] | None = (
        None
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    prompt_logprobs: NumAlternatives | None = None
    kvferry_timing: bool | None = None
    kvferry_token_lines: bool | None = None
    kvferry_first_choice: Annotated[int, Meta(ge=0, le=MAX_CHOICES)] | None = None
    kv_transfer_params: KVTransferParams | None = None
    resume: list[Resume] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """The client's own limit of output tokens; the newer of OpenAI's two names wins if both are given."""
        kv = self.kv_transfer_params
        if kv is not None and kv.do_remote_decode:
            return kv.client_max_tokens
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """The field that has the limit."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def given_prompt(self) -> object:
        """The prompt as it was given."""
        raise NotImplementedError

    @property
    def ends_when_complete(self) -> bool:
        """Whether the answer is constrained."""
        return self.is_constrained

    @property
    def num_alternatives(self) -> int | None:
        """How many likeliest tokens to report per position; None for no logprobs at all."""
        raise NotImplementedError

    @property
    def num_prompt_alternatives(self) -> int | None:
        """How many likeliest tokens are wanted of each of the prompt's positions; None for no logprobs."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Raise `ApiError` for what the types above cannot say."""
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs are only for answers that are not streamed", "prompt_logprobs")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise bad_request(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
        if sum(len(each.encode()) for each in self.stop_strings) > MAX_STOP_BYTES:
            raise bad_request(f"the stop strings may have at most {MAX_STOP_BYTES} bytes together", "stop")
        if "" in self.stop_strings:
            raise bad_request("a stop string must not be empty", "stop")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed when stream is true", "stream_options")
        if self.stream_options is not None:
            options = self.stream_options
            if options.continuous_usage_stats and not options.include_usage:
                raise bad_request("continuous_usage_stats needs include_usage to be true", "stream_options")
        if sum(len(word.encode(errors="replace")) for word in self.bad_words or ()) > MAX_BAD_WORD_BYTES:
            raise bad_request(f"bad_words may have at most {MAX_BAD_WORD_BYTES} bytes together", "bad_words")
        if any(not word.strip() for word in self.bad_words or ()):
            raise bad_request("a bad word must have more than spaces", "bad_words")
        if self.ignore_eos and self.ends_when_complete:
            message = "ignore_eos: an answer with a constraint ends when it is complete"
            raise bad_request(message, "ignore_eos")
        if self.truncate_prompt_tokens == 0:
            raise bad_request("truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
        if self.kv_transfer_params is not None:
            self.kv_transfer_params.check(self.num_choices, bool(self.stream))
            if self.num_prompt_alternatives is not None or self.limit == 0:
                message = "logprobs of the prompt, and prompts without output, are for one agent alone"
                raise bad_request(message, "kv_transfer_params")
        if self.resume is not None:
            check_resume(self.resume, self.kv_transfer_params, bool(self.stream))


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: NumAlternatives | None = None
    best_of: int | None = None

    @property
    def given_prompt(self) -> object:
        return self.prompt

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_alternatives(self) -> int | None:
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((each for each in asked if each is not None), default=None)

    def check(self) -> None:
        GenerationBody.check(self)
        if self.best_of is not None and self.best_of != self.num_choices:
            raise bad_request("best_of is not supported beyond n", "best_of")


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def shown(self) -> str | None:
        """The text, or that of a refusal; None for what is neither."""
        return {"text": self.text, "refusal": self.refusal}.get(self.type)


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message; fields beyond role and content are there for templates that read them."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Raw = _NULL
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""OpenAI's. Templates take any word, and most show a message of an unknown one as if it were known."""


class _CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = ""


class _ToolCall(msgspec.Struct, frozen=True):
    """A call in a message of the history."""

    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Template | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    kvferry_hints: list[Literal["reasoning_effort"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None

    @property
    def given_prompt(self) -> object:
        return self.messages

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse(self.tools or (), self.tool_choice or "auto", self.parallel_tool_calls is not False)

    @property
    def ends_when_complete(self) -> bool:
        return self.is_constrained or self.tool_use.constrains

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        GenerationBody.check(self)
        if not self.messages:
            raise bad_request("messages must not be empty", "messages")
        self.tool_use.check()
        if self.tool_use.tools and self.is_constrained:
            message = "an answer is constrained, or may call tools: leave tools out, or tool_choice none"
            raise bad_request(message, "tools")
        if self.echo:
            raise bad_request("echo: only completions repeat their prompt", "echo", "unsupported_field")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise bad_request(f"{name} must be at least 1", name)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.continue_final_message:
            if self.add_generation_prompt:
                message = "continue_final_message and add_generation_prompt exclude each other"
                raise bad_request(message, "continue_final_message")
            if self.messages[-1].role != "assistant":
                message = "only a message of the assistant can be continued"
                raise bad_request(message, "continue_final_message")
        if len(msgspec.json.encode(self.chat_template_kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
            message = f"chat_template_kwargs may have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes"
            raise bad_request(message, "chat_template_kwargs")


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, as vLLM has it: of a text, or of a chat's prompt."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Template | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None

    def chat(self, model: str) -> ChatBody | None:
        """Return the chat whose prompt is asked for; None for a text. Raises `ApiError` 400."""
        if self.messages is None:
            return None
        body = ChatBody(
            model=model,
            messages=self.messages,
            add_special_tokens=self.add_special_tokens,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )
        body.check()
        return body


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize, as vLLM has it."""

    tokens: list[TokenId]
    model: ModelName | None = None


HONOURED: Mapping[type[GenerationBody], frozenset[str]] = MappingProxyType(
    {kind: frozenset(kind.__struct_fields__) for kind in (CompletionBody, ChatBody)}
)
"""The fields of each endpoint that change its answer, or how it is sent."""
_ANYWHERE = HONOURED[CompletionBody] | HONOURED[ChatBody]
_FIELD_DECODER: FieldDecoder = field_decoder(_ANYWHERE)


def decode_body(raw: bytes, body_type: type[_Body], max_model_len: int | None = None) -> _Body:
    """Type and check one body. Raises `ApiError` 400 naming the field at fault, and nothing else.

    What cannot fit `max_model_len` is refused before anything is made of it: this runs on the event loop.
    """
    try:
        check_utf8(raw)
        check_fields(raw, _FIELD_DECODER, HONOURED[body_type], _ANYWHERE)
        if len(raw) > _SMALL_BODY_BYTES:
            _check_sizes(msgspec.json.decode(raw, type=_LargeFields), max_model_len)
        body = msgspec.json.decode(raw, type=body_type)
    except NOT_JSON as error:
        raise _invalid(error) from error
    body.check()
    return body


def decode_tokenize_body(raw: bytes, max_model_len: int | None = None) -> TokenizeBody:
    """Type and check a body of /tokenize. Raises `ApiError` 400."""
    body = _decode_plain(raw, TokenizeBody, max_model_len)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("either prompt or messages must be given", "prompt")
    return body


def decode_detokenize_body(raw: bytes) -> DetokenizeBody:
    """Type and check a body of /detokenize. Raises `ApiError` 400."""
    if len(raw) > MAX_TOKEN_IDS_BYTES:
        raise bad_request(f"the body may have at most {MAX_TOKEN_IDS_BYTES} bytes", "tokens")
    return _decode_plain(raw, DetokenizeBody, None)


def _decode_plain(raw: bytes, body_type: type[_Plain], max_model_len: int | None) -> _Plain:
    try:
        check_utf8(raw)
        if len(raw) > _SMALL_BODY_BYTES:
            _check_sizes(msgspec.json.decode(raw, type=_LargeFields), max_model_len)
        return msgspec.json.decode(raw, type=body_type)
    except NOT_JSON as error:
        raise _invalid(error) from error


def completion_prompt(body: CompletionBody, max_model_len: int) -> str | tuple[int, ...]:
    """The one prompt of a completion: text to encode, or ids to take as they are.

    Raises `ApiError` 400, for more ids than the context holds before looking at them.
    OpenAI allows a list of prompts; one request is one prompt here, so such a list must have one element.
    """
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > max_model_len and body.truncate_prompt_tokens is None:
        check_context(len(prompt), None, max_model_len)
    try:
        return tuple(msgspec.convert(prompt, list[TokenId]))
    except msgspec.ValidationError as error:
        raise _no_prompt() from error


def chat_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content is one string, parts joined by newlines."""
    return [_message(each) for each in body.messages]


def check_chat_size(body: ChatBody, max_model_len: int, max_bytes: int | None) -> int:
    """Return the bytes of all messages' texts. Raises `ApiError` 400 for what no template makes fit.

    `max_bytes` is what the context can hold; a template may leave out a part of a long conversation.
    """
    parts = [each.content for each in body.messages if isinstance(each.content, list)]
    if len(body.messages) + sum(map(len, parts)) > max_model_len:
        raise _too_many_messages(max_model_len)
    size = sum(map(_message_bytes, body.messages))
    if body.tools:
        size += len(msgspec.json.encode(body.tools))
    if max_bytes is not None and size > MAX_OMITTED * max_bytes:
        raise text_too_long(max_model_len, size, "messages")
    return size


def _message_bytes(message: ChatMessage) -> int:
    """Return the bytes of what a template may show of a message."""
    content = message.content
    texts = [part.shown for part in content] if isinstance(content, list) else [content, message.refusal]
    texts += [message.role, message.name, message.tool_call_id, message.reasoning_content]
    size = sum(len(text.encode(errors="replace")) for text in texts if text)
    return size + (len(bytes(message.tool_calls)) if _has_tool_calls(message) else 0)


def _has_tool_calls(message: ChatMessage) -> bool:
    return bytes(message.tool_calls) not in (b"null", b"[]")


def text_too_long(max_model_len: int, size: int, param: str) -> ApiError:
    """The error for a text that has more bytes than the context's tokens could spell."""
    message = f"the context holds {max_model_len} tokens, which {size} bytes of text cannot fit"
    return bad_request(message, param, "context_length_exceeded")


def check_token_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raise `ApiError` 400 for an id that the model cannot embed."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise bad_request(f"{param} holds a token id outside the vocabulary of {vocab_size}", param)


def check_resumed(resume: list[Resume], *, max_tokens: int, vocab_size: int) -> None:
    """Raise `ApiError` 400 where a broken stream's tokens do not fit the request."""
    for each in resume:
        if len(each.output_ids) + (each.finish_reason is None) > max_tokens:
            raise bad_request(f"the limit of {max_tokens} tokens ends this choice before", "resume")
        check_token_ids(tuple(each.output_ids), vocab_size, "resume")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a body that leaves a setting out means: generation_config.json's values, as in vLLM.

    `max_new_tokens` limits an answer for which the client gives no limit.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


def read_sampling_defaults(directory: Path, source: Literal["auto", "none"]) -> SamplingDefaults:
    """Read a checkpoint's defaults; with "none", or without the file, those of OpenAI's API.

    Raises ValueError, naming the file, when a value is out of its range.
    """
    path = directory / "generation_config.json"
    if source == "none" or not path.is_file():
        return SamplingDefaults()
    config = read_json(path)
    known = {
        name: config[name] for name in SamplingDefaults.__struct_fields__ if config.get(name) is not None
    }
    try:
        return msgspec.convert(known, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error


def sampling_params(
    body: GenerationBody,
    *,
    prompt_len: int,
    max_model_len: int,
    vocab_size: int,
    seed: int,
    defaults: SamplingDefaults,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> SamplingParams:
    """Resolve limits and defaults against the prompt and the context.

    `seed` is used when the client gave none (or -1, as in vLLM); `bad_words` are the body's, encoded, and
    `grammar` what it constrains the answer to. Raises `ApiError` 400 if the request does not fit.
    """
    check_token_ids(tuple(body.stop_token_ids or ()), vocab_size, "stop_token_ids")
    check_token_ids(tuple(body.logit_bias or ()), vocab_size, "logit_bias")
    check_token_ids(tuple(body.allowed_token_ids or ()), vocab_size, "allowed_token_ids")
    max_tokens = check_context(prompt_len, body.limit, max_model_len, body.limit_name)
    if body.limit is None and defaults.max_new_tokens is not None:
        max_tokens = min(max_tokens, defaults.max_new_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens {min_tokens} is above the limit of {max_tokens} tokens", "min_tokens")
    temperature = _given(body.temperature, defaults.temperature)
    return SamplingParams(
        seed=seed if body.seed in (None, NO_SEED) else body.seed,
        n=body.num_choices,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
        top_p=_given(body.top_p, defaults.top_p),
        top_k=max(0, _given(body.top_k, defaults.top_k)),
        min_p=_given(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=body.logit_bias or {},
        logprobs=body.num_alternatives,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        bad_words=bad_words,
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        prompt_logprobs=body.num_prompt_alternatives,
        grammar=grammar,
    )


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def truncated(prompt_ids: tuple[int, ...], keep: int | None, max_model_len: int) -> tuple[int, ...]:
    """Cut a prompt's beginning off, so that `keep` tokens stay; -1 keeps what leaves room for an answer.

    Raises `ApiError` 400 when more are to stay than the context holds.
    """
    if keep is None:
        return prompt_ids
    if keep >= max_model_len:
        message = f"truncate_prompt_tokens must be below the context of {max_model_len} tokens"
        raise bad_request(message, "truncate_prompt_tokens")
    return prompt_ids[-(max_model_len - 1 if keep == -1 else keep) :]


def check_context(
    prompt_len: int, limit: int | None, max_model_len: int, limit_name: str = "max_tokens"
) -> int:
    """Return how long the answer may be. Raises `ApiError` 400 if the request does not fit the context."""
    if prompt_len == 0:
        raise bad_request("the prompt is empty", "prompt")
    room = max_model_len - prompt_len
    if room < (1 if limit is None else limit):
        asked = f"{prompt_len} tokens of prompt" + (f" and {limit} of answer" if limit else "")
        message = f"the context holds {max_model_len} tokens; the request asks for {asked}"
        raise bad_request(message, "prompt" if room < 1 else limit_name, "context_length_exceeded")
    return room if limit is None else limit


class _LargeFields(msgspec.Struct):
    """The fields of a body that may be large, not decoded."""

    prompt: Raw = _NULL
    messages: Raw = _NULL
    logit_bias: Raw = _NULL
    stop: Raw = _NULL
    stop_token_ids: Raw = _NULL
    bad_words: Raw = _NULL
    allowed_token_ids: Raw = _NULL
    chat_template_kwargs: Raw = _NULL
    tools: Raw = _NULL
    response_format: Raw = _NULL
    structured_outputs: Raw = _NULL
    guided_json: Raw = _NULL
    guided_regex: Raw = _NULL
    guided_choice: Raw = _NULL
    guided_grammar: Raw = _NULL
    guided_whitespace_pattern: Raw = _NULL
    truncate_prompt_tokens: Raw = _NULL


_BYTE_LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "logit_bias": MAX_SETTING_BYTES,
        "stop": MAX_SETTING_BYTES,
        "stop_token_ids": MAX_SETTING_BYTES,
        "bad_words": MAX_SETTING_BYTES,
        "allowed_token_ids": MAX_TOKEN_IDS_BYTES,
        "chat_template_kwargs": MAX_SETTING_BYTES,
        "tools": MAX_TOOLS_BYTES,
        "response_format": MAX_GRAMMAR_BYTES,
        "structured_outputs": MAX_GRAMMAR_BYTES,
        "guided_json": MAX_GRAMMAR_BYTES,
        "guided_regex": MAX_GRAMMAR_BYTES,
        "guided_choice": MAX_GRAMMAR_BYTES,
        "guided_grammar": MAX_GRAMMAR_BYTES,
        "guided_whitespace_pattern": MAX_SETTING_BYTES,
    }
)


def _check_sizes(fields: _LargeFields, max_model_len: int | None) -> None:
    """Raise `ApiError` 400 for what would take long to decode, and could only be refused then."""
    for name, most in _BYTE_LIMITS.items():
        if len(bytes(getattr(fields, name))) > most:
            raise bad_request(f"{name} may have at most {most} bytes", name)
    prompt = bytes(fields.prompt)
    if prompt.startswith(b"["):
        is_truncated = bytes(fields.truncate_prompt_tokens) not in (b"", b"null")
        if is_truncated and len(prompt) > MAX_TOKEN_IDS_BYTES:
            raise bad_request(f"a prompt to truncate may have at most {MAX_TOKEN_IDS_BYTES} bytes", "prompt")
        _check_listed_prompt(prompt, None if is_truncated else max_model_len)
    # A quote within a text has a backslash before it, so this counts objects, and texts that end in a brace.
    objects = bytes(fields.messages).translate(None, _SPACE).count(b'{"')
    if max_model_len is not None and objects > _OBJECTS_PER_PART * max_model_len:
        raise _too_many_messages(max_model_len)


def _check_listed_prompt(prompt: bytes, max_model_len: int | None) -> None:
    """Raise `ApiError` 400 unless the prompt is a list of one text, or of ids that can fit the context."""
    if prompt.translate(None, _OF_TOKEN_IDS):
        is_text = prompt[1:].lstrip(_SPACE).startswith(b'"')
        # The quote that opens a text has no backslash before it.
        if not is_text or prompt.count(b'"') - prompt.count(b'\\"') > 2:
            raise _no_prompt()
    elif prompt.count(b"[") > 2:
        raise _no_prompt()
    elif max_model_len is not None and prompt.count(b",") + 1 > max_model_len:
        check_context(prompt.count(b",") + 1, None, max_model_len)


def _no_prompt() -> ApiError:
    what = "a string, a list of token ids, or a list of one of these"
    return bad_request(f"prompt must be {what}", "prompt", "invalid_type")


def _too_many_messages(max_model_len: int) -> ApiError:
    message = f"messages and their parts may be {max_model_len} in all, as many as the context has tokens"
    return bad_request(message, "messages", "context_length_exceeded")


def _message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates read it. A call that was cut off is no call: its text is content."""
    if message.role not in _ROLES:
        raise bad_request(f"a message's role must not be {message.role!r}", "messages")
    calls, broken = _tool_calls(message)
    content = "\n".join(filter(None, [_content_text(message), *broken]))
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    if calls:
        shown["tool_calls"] = calls
    return shown


def _tool_calls(message: ChatMessage) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the calls, and the texts of those that are not whole."""
    raw = bytes(message.tool_calls)
    if raw == b"null":
        return [], []
    if len(raw) > MAX_TOOL_CALLS_BYTES:
        raise bad_request(f"tool_calls may have at most {MAX_TOOL_CALLS_BYTES} bytes", "messages")
    try:
        given = msgspec.json.decode(raw, type=list[_ToolCall])
    except NOT_JSON as error:
        raise _wrong_calls(error) from error
    read = [(call.function, _tool_call(call)) for call in given]
    broken = [_broken_call(each) for each, call in read if call is None]
    return [call for _, call in read if call is not None], broken


def _wrong_calls(error: BaseException) -> ApiError:
    problem = explain(error, whole="arguments" if isinstance(error, msgspec.ValidationError) else "it")
    what = "tool_calls must be a list of calls, each with a function's name and arguments"
    return bad_request(f"{what}: {problem.message}", "messages", "invalid_type")


def _tool_call(call: _ToolCall) -> dict[str, Any] | None:
    """Return a call as chat templates read it: they write its arguments as JSON themselves.

    None if those break off, or are no JSON for another reason.
    """
    arguments = call.function.arguments
    if not isinstance(arguments, dict):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any] | None) or {}
        except NOT_JSON as error:
            if not str(arguments).lstrip().startswith("{"):
                raise _wrong_calls(error) from error
            return None
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _broken_call(function: _CalledFunction) -> str:
    return f'{{"name": {json.dumps(function.name)}, "arguments": {function.arguments}'


def _content_text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":  # it called, or only reasoned, or refused
            return message.refusal or ""
        raise bad_request("a message's content must not be null", "messages", "invalid_type")
    texts = [text for part in message.content if (text := part.shown) is not None]
    if len(texts) != len(message.content):
        raise bad_request("only text parts are supported in a message's content", "messages")
    return "\n".join(texts)


def _invalid(error: BaseException, where: str = "") -> ApiError:
    """The error for a body that is not the JSON that it should be, or its part at `where`."""
    problem = explain(error, where)
    return bad_request(problem.message, problem.field, problem.code)
