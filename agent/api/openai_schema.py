# SPDX-License-Identifier: Apache-2.0
"""Bodies of the OpenAI endpoints: typed, checked, and turned into a prompt and `SamplingParams`. Pure.

Unknown fields are ignored, as OpenAI's clients send many; fields that would change the answer and are not
supported are refused by name.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from kvferry.agent.api.kv_params import KVTransferParams, Resume, check_resume
from kvferry.agent.errors import ApiError, bad_request
from kvferry.agent.ids import MAX_SEED
from kvferry.agent.messages.requests import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
"""Of all stop strings together: each new token is compared with every beginning of them."""
MAX_LOGIT_BIASES = 300
"""As many as OpenAI takes."""
MAX_STOP_TOKEN_IDS = 1024
MAX_OMITTED = 4
"""How many times the context the contents of a chat may be: templates leave out earlier reasoning."""
# Dividing float32 logits by less than this could overflow; sampling would be greedy anyway.
_MIN_TEMPERATURE = 1e-5

Limit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NumAlternatives = Annotated[int, Meta(ge=0, le=20)]

_Body = TypeVar("_Body", bound="GenerationBody")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat completions have in common. A null is the same as a field left out."""

    model: str
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
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
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    kvferry_timing: bool | None = None
    kvferry_token_lines: bool | None = None
    kv_transfer_params: KVTransferParams | None = None
    resume: list[Resume] | None = None
    response_format: dict[str, Any] | None = None

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
        return self.max_completion_tokens or self.max_tokens

    @property
    def given_prompt(self) -> object:
        """The prompt as it was given."""
        raise NotImplementedError

    @property
    def num_alternatives(self) -> int | None:
        """How many likeliest tokens to report per position; None for no logprobs at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ApiError` for what the types above cannot say."""
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise bad_request(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
        if sum(len(each.encode()) for each in self.stop_strings) > MAX_STOP_BYTES:
            raise bad_request(f"the stop strings may have at most {MAX_STOP_BYTES} bytes together", "stop")
        if "" in self.stop_strings:
            raise bad_request("a stop string must not be empty", "stop")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed when stream is true", "stream_options")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise bad_request("only the response format 'text' is supported", "response_format")
        if self.kv_transfer_params is not None:
            self.kv_transfer_params.check(self.num_choices, bool(self.stream))
        if self.resume is not None:
            check_resume(self.resume, self.kv_transfer_params, bool(self.stream))


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: NumAlternatives | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def given_prompt(self) -> object:
        return self.prompt

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        GenerationBody.check(self)
        if self.echo:
            raise bad_request("echo is not supported", "echo")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise bad_request("best_of is not supported beyond n", "best_of")
        if self.suffix:
            raise bad_request("suffix is not supported", "suffix")


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message; fields beyond role and content are there for templates that read them."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    tools: list[Any] | None = None

    @property
    def given_prompt(self) -> object:
        return self.messages

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        GenerationBody.check(self)
        if not self.messages:
            raise bad_request("messages must not be empty", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.tools:
            raise bad_request("tools are not supported", "tools")


def decode_body(raw: bytes, body_type: type[_Body]) -> _Body:
    """Type and check one body. Raises `ApiError` 400 naming the field at fault, and nothing else."""
    try:
        body = msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as error:
        _raise_invalid(str(error))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    body.check()
    return body


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
    if len(prompt) >= max_model_len:
        check_context(len(prompt), None, max_model_len)
    try:
        return tuple(msgspec.convert(prompt, list[TokenId]))
    except msgspec.ValidationError as error:
        what = "a string, a list of token ids, or a list of one of these"
        raise bad_request(f"prompt must be {what}", "prompt", "invalid_type") from error


def chat_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content is one string, parts joined by newlines."""
    return [{**msgspec.to_builtins(each), "content": _content_text(each)} for each in body.messages]


def check_chat_size(body: ChatBody, max_model_len: int, max_bytes: int | None) -> int:
    """Return the bytes of all contents. Raises `ApiError` 400 for what no template makes fit.

    `max_bytes` is what the context can hold; a template may leave out a part of a long conversation.
    """
    parts = [each.content for each in body.messages if isinstance(each.content, list)]
    if len(body.messages) + sum(map(len, parts)) > max_model_len:
        message = f"messages and their parts may be {max_model_len} in all, as many as the context has tokens"
        raise bad_request(message, "messages", "context_length_exceeded")
    size = sum(
        len(each.content.encode(errors="replace")) for each in body.messages if isinstance(each.content, str)
    )
    size += sum(len((part.text or "").encode(errors="replace")) for part in itertools.chain(*parts))
    if max_bytes is not None and size > MAX_OMITTED * max_bytes:
        raise text_too_long(max_model_len, size, "messages")
    return size


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
        check_token_ids(tuple(each.output_ids), vocab_size, "resume")
        if len(each.output_ids) + (each.finish_reason is None) > max_tokens:
            raise bad_request(f"the limit of {max_tokens} tokens ends this choice before", "resume")


def sampling_params(
    body: GenerationBody, *, prompt_len: int, max_model_len: int, vocab_size: int, seed: int
) -> SamplingParams:
    """Resolve limits and defaults against the prompt and the context.

    `seed` is used when the client gave none. Raises `ApiError` 400 if the request does not fit.
    """
    check_token_ids(tuple(body.stop_token_ids or ()), vocab_size, "stop_token_ids")
    check_token_ids(tuple(body.logit_bias or ()), vocab_size, "logit_bias")
    max_tokens = check_context(prompt_len, body.limit, max_model_len)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens {min_tokens} is above the limit of {max_tokens} tokens", "min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        seed=seed if body.seed is None else body.seed,
        n=body.num_choices,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=body.logit_bias or {},
        logprobs=body.num_alternatives,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )


def check_context(prompt_len: int, limit: int | None, max_model_len: int) -> int:
    """Return how long the answer may be. Raises `ApiError` 400 if the request does not fit the context."""
    if prompt_len == 0:
        raise bad_request("the prompt is empty", "prompt")
    room = max_model_len - prompt_len
    if room < 1 or (limit or 0) > room:
        asked = f"{prompt_len} tokens of prompt" + (f" and {limit} of answer" if limit else "")
        message = f"the context holds {max_model_len} tokens; the request asks for {asked}"
        raise bad_request(message, "prompt" if room < 1 else "max_tokens", "context_length_exceeded")
    return limit or room


def _content_text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise bad_request("a message's content must not be null", "messages", "invalid_type")
    texts = [part.text for part in message.content if part.type == "text" and part.text is not None]
    if len(texts) != len(message.content):
        raise bad_request("only text parts are supported in a message's content", "messages")
    return "\n".join(texts)


def _raise_invalid(reason: str) -> NoReturn:
    """Translate msgspec's wording: what was expected, and at which field."""
    path, missing = _PATH.search(reason), _MISSING_FIELD.search(reason)
    where = path.group(1) if path else ""
    if missing:
        where = f"{where}.{missing.group(1)}" if where else missing.group(1)
    expected = _PATH.sub("", reason).replace("`", "")
    code = "missing_field" if missing else "invalid_value" if re.search(r"[<>]", expected) else "invalid_type"
    raise ApiError(400, code, f"{where or 'body'}: {expected}", where or None)
