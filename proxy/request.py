# SPDX-License-Identifier: Apache-2.0
"""Request bodies, validated once at the edge. Fields that the proxy does not know pass through unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.proxy.errors import NOT_JSON, InvalidRequest
from kvferry.proxy.ids import Endpoint

MAX_CHOICES = 128

Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Message(msgspec.Struct):
    role: str


class _Sampling(msgspec.Struct, kw_only=True):
    """The fields that both endpoints share, with their types and ranges."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


class CompletionRequest(_Sampling, kw_only=True):
    """A body of `/v1/completions`, as far as the proxy reads it."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0)] | None = None


class ChatRequest(_Sampling, kw_only=True):
    """A body of `/v1/chat/completions`, as far as the proxy reads it."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A validated request. `body` is the client's own, complete; the other fields are what the proxy reads
    of it.

    `max_tokens` is the client's limit on output tokens, None for what the context allows. `prompts` is the
    number of prompts, each with `n` choices. `prompt_tokens` is known only for prompts of token ids, and is
    the longest one's.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    model: str
    stream: bool
    include_usage: bool
    return_token_ids: bool
    n: int
    max_tokens: int | None
    seed: int | None
    prompts: int = 1
    prompt_tokens: int | None

    @property
    def include_timing(self) -> bool:
        """Whether the answer should report how long its parts took (`kvferry_timing`)."""
        return self.body.get("kvferry_timing") is True

    @property
    def sequences(self) -> int:
        """The number of choices of the answer."""
        return self.n * self.prompts

    @property
    def undivided(self) -> bool:
        """Whether one agent must do it all, since logprobs of the prompt itself are requested."""
        body = self.body
        logprobs = body.get("logprobs")
        echoed = bool(body.get("echo")) and logprobs is not None and logprobs is not False
        return echoed or body.get("prompt_logprobs") is not None

    @property
    def chat(self) -> bool:
        return self.endpoint == "chat/completions"

    @property
    def prompt(self) -> str | list[Any]:
        """Text, token ids, or a chat's messages."""
        prompt: str | list[Any] = self.body["messages" if self.chat else "prompt"]
        return prompt


def parse_request(endpoint: Endpoint, raw: bytes) -> ClientRequest:
    """Validate a request's body. Raises `InvalidRequest`, which names the invalid field."""
    body = _parse_json(raw)
    fields = _convert(body, ChatRequest if endpoint == "chat/completions" else CompletionRequest)
    for name in ("kv_transfer_params", "resume"):
        if body.pop(name, None) is not None:
            raise InvalidRequest(f"{name} is reserved for the proxy", param=name)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options is only allowed with stream=true", param="stream_options")
    prompts = _prompts(fields.prompt) if isinstance(fields, CompletionRequest) else []
    lengths = [len(prompt) for prompt in prompts if not isinstance(prompt, str)]
    if len(prompts) * (fields.n or 1) > MAX_CHOICES:
        raise InvalidRequest(f"n times the number of prompts may be {MAX_CHOICES} at most", param="n")
    return ClientRequest(
        endpoint=endpoint,
        body=body,
        model=fields.model,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
        n=fields.n or 1,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        seed=fields.seed,
        prompts=len(prompts) or 1,
        prompt_tokens=max(lengths, default=None),
    )


def check_context(request: ClientRequest, max_model_len: int | None) -> None:
    """Raise `InvalidRequest` if prompt and output exceed the agents' context; None when that is unknown."""
    wanted = request.max_tokens or 1
    if max_model_len is None:
        return
    if request.prompt_tokens is not None and request.prompt_tokens + wanted > max_model_len:
        raise InvalidRequest(
            f"the context length is {max_model_len} tokens; the prompt has {request.prompt_tokens} "
            f"and at least {wanted} are to be generated",
            param="prompt",
        )


class _CompletionUsage(msgspec.Struct):
    completion_tokens: int = 0


class _AnswerWithUsage(msgspec.Struct):
    usage: _CompletionUsage | None = None


def completion_tokens(answer: bytes) -> int:
    """The completion tokens that a complete answer reports in its usage; 0 without one."""
    try:
        usage = msgspec.json.decode(answer, type=_AnswerWithUsage).usage
    except NOT_JSON:
        return 0
    return 0 if usage is None else usage.completion_tokens


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except NOT_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _convert(
    body: dict[str, Any], kind: type[CompletionRequest] | type[ChatRequest]
) -> CompletionRequest | ChatRequest:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        param = _invalid_field(str(error))
        raise InvalidRequest(f"{param}: {error}" if param else str(error), param=param) from error


def _invalid_field(message: str) -> str | None:
    """The field that msgspec's message names: ``... - at `$.n` `` or ``... required field `model` ``."""
    if "`$." in message:
        return message.rsplit("`$.", 1)[1].split("`", 1)[0]
    if "required field `" in message:
        return message.split("required field `", 1)[1].split("`", 1)[0]
    return None


def prompts_of(body: dict[str, Any]) -> list[Any]:
    """The prompts of a validated completion's body, either all text or all token ids."""
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]


def _prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """Validate a completion's `prompt`, one or many, all of one kind. Raises `InvalidRequest`."""
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    prompts = prompts_of({"prompt": prompt})
    if not all(prompts):
        raise InvalidRequest("the prompt is empty", param="prompt")
    try:
        if isinstance(prompts[0], str):
            return msgspec.convert(prompts, list[str])
        return msgspec.convert(prompts, list[list[TokenId]])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"prompt: {error}", param="prompt") from error
