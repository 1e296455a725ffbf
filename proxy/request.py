# SPDX-License-Identifier: Apache-2.0
"""Clients' requests: their heads, and their bodies, validated once at the edge. Fields that the proxy does
not know pass through unchanged.

A body may have megabytes, and decoding runs on the event loop that relays everybody's tokens. So nothing is
decoded that the proxy does not read: a field is kept as the JSON that it came as (`msgspec.Raw`), of which
decoding checks the syntax without making objects. What is decoded has bounds of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, field

from kvferry.common.hashing import Purpose, digest
from kvferry.common.http.refusals import encoding_refusal
from kvferry.common.json_errors import check_utf8
from kvferry.proxy.errors import NOT_JSON, InvalidRequest, UnsupportedEncoding
from kvferry.proxy.ids import Endpoint, RequestId
from kvferry.proxy.wire.dialects import MAX_KEEP_S

T = TypeVar("T")

MAX_CHOICES = 128
MAX_MODEL_CHARS = 1024
MAX_CACHE_SALT_CHARS = 512
"""Longest `cache_salt` of a client with an API key: agents see what is derived from it."""
MAX_SETTING_BYTES = 64 * 1024
"""Largest `stop` and largest `logit_bias`, in bytes of JSON."""
MAX_MEMBERS = 32768
"""Most members of all objects in a body, those within prompts, messages, tools and documents not counted."""
MAX_MESSAGES_CHECKED = 16384
"""A chat with more objects than this leaves its roles to the agent to check."""
_CACHE_SALT_BYTES = 16
_NOT_GIVEN = (b"", b"null")
_EMPTY = (b'""', b"[]")
_SPACE = b" \t\r\n"
_OF_TOKEN_IDS = b"0123456789,[]" + _SPACE

Count = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
"""The lower goes first, as in vLLM."""
Priority = Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
MIN_OBJECTIVE_MS, MAX_OBJECTIVE_MS = 0.1, 3_600_000.0
_PRIORITY = re.compile(r"-?[0-9]{1,10}")
_NUMBER = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")
NO_SEED = -1
"""A client's seed that asks for none, as vLLM takes it."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a request begins with. `headers`: the last of each name, names in lower case."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    id: RequestId

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def objective_s(self, name: str) -> float | None:
        """Return an objective of the client's, which the header has in ms. Raises `InvalidRequest`."""
        return self._parsed(name, _parse_objective)

    def cache_ttl_s(self) -> float | None:
        """Return what the header `x-cache-ttl-s` has. Raises `InvalidRequest`."""
        return self._parsed("x-cache-ttl-s", parse_cache_ttl)

    def priority(self) -> int | None:
        """Return the priority that the header `x-priority` has. Raises `InvalidRequest`."""
        return self._parsed("x-priority", parse_priority)

    def rejects_late(self) -> bool:
        """Whether the header `x-slo-reject` has the request rejected where its first token would be late.

        Raises `InvalidRequest`.
        """
        value = self.header(b"x-slo-reject")
        if value not in (None, "true", "false"):
            raise InvalidRequest("the header x-slo-reject must be true or false", param="x-slo-reject")
        return value == "true"

    def _parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        value = self.header(name.encode())
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise InvalidRequest(f"the header {name} {error}", param=name) from error


def _parse_objective(text: str) -> float:
    """Parse a number of ms; returns seconds. Raises `ValueError`."""
    if not _NUMBER.fullmatch(text) or not MIN_OBJECTIVE_MS <= float(text) <= MAX_OBJECTIVE_MS:
        raise ValueError(f"must be a number of ms, from {MIN_OBJECTIVE_MS} to {int(MAX_OBJECTIVE_MS)}")
    return float(text) / 1000


def parse_cache_ttl(text: str) -> float:
    """Parse a `cache_ttl_s`. Raises `ValueError`."""
    if not _NUMBER.fullmatch(text) or float(text) > MAX_KEEP_S:
        raise ValueError(f"must be a number of seconds, {MAX_KEEP_S:.0f} at most")
    return float(text)


def parse_priority(text: str) -> int:
    """Parse a priority. Raises `ValueError`."""
    if not _PRIORITY.fullmatch(text) or not MIN_PRIORITY <= int(text) <= MAX_PRIORITY:
        raise ValueError(f"must be an integer from {MIN_PRIORITY} to {MAX_PRIORITY}")
    return int(text)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What some engine knows; the proxy reads the first two."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Message(msgspec.Struct, gc=False):
    role: str


class _CommonFields(msgspec.Struct, kw_only=True):
    """The fields that both endpoints share, with their types and ranges."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Raw = field(default_factory=Raw)
    stop: Raw = field(default_factory=Raw)
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    priority: Priority | None = None
    prompt_logprobs: Raw = field(default_factory=Raw)
    cache_salt: Raw = field(default_factory=Raw)
    cache_ttl_s: Annotated[float, Meta(ge=0, le=MAX_KEEP_S)] | None = None
    kvferry_timing: bool | None = None
    kvferry_hints: Raw = field(default_factory=Raw)
    kv_transfer_params: Raw = field(default_factory=Raw)
    resume: Raw = field(default_factory=Raw)
    tools: Raw = field(default_factory=Raw)
    documents: Raw = field(default_factory=Raw)


class CompletionRequest(_CommonFields, kw_only=True):
    """A body of `/v1/completions`, as far as the proxy reads it."""

    prompt: Raw
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None


class ChatRequest(_CommonFields, kw_only=True):
    """A body of `/v1/chat/completions`, as far as the proxy reads it."""

    messages: Raw
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request. `body` is the client's own, complete, each field as `Raw`; the other fields are
    what the proxy reads of it.

    `prompt` is text, token ids, a list of either, or a chat's messages. `max_tokens` is the client's limit on
    output tokens, None for what the context allows. `prompts` is the number of prompts, each with `n`
    choices. `prompt_tokens` is known only for prompts of token ids, and is the longest one's.
    `continuous_usage`: whether every event of a stream should carry the token counts so far. `cache_salt`
    keeps the prefixes of those who have another one apart. `include_timing`: whether the answer should report
    how long its parts took. `hints`: which fields have no effect where they cannot have any; only kvferry's
    agents read that, so it is no part of `body`. `undivided`: whether one agent must do it all, since
    logprobs of the prompt itself are requested, or nothing but the prompt. `ttft_s` and `tpot_s` are the
    objectives of the client's headers, in seconds; `rejects_late`: whether the request is to be rejected
    where the first would be missed. `priority`: the lower goes first. `key`: which client it is, for those
    with an API key. `cache_ttl_s`: for how many seconds the KV of the prompt and the answers is to be kept
    for the next turn; None leaves that to the proxy, up to `max_cache_ttl_s`.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    model: str
    prompt: Raw
    stream: bool
    include_usage: bool
    include_timing: bool
    return_token_ids: bool
    undivided: bool
    n: int
    best_of: int
    min_tokens: int | None
    max_tokens: int | None
    seed: int | None
    prompts: int = 1
    prompt_tokens: int | None = None
    continuous_usage: bool = False
    cache_salt: Raw = field(default_factory=Raw)
    hints: Raw = field(default_factory=Raw)
    ttft_s: float | None = None
    tpot_s: float | None = None
    rejects_late: bool = False
    priority: int = 0
    key: bytes = b""
    cache_ttl_s: float | None = None
    max_cache_ttl_s: float = MAX_KEEP_S

    @property
    def sequences(self) -> int:
        """The number of choices of the answer."""
        return self.n * self.prompts

    @property
    def chat(self) -> bool:
        return self.endpoint == "chat/completions"

    def asks_for(self, name: str) -> bool:
        """Whether the client set this field to anything but null or false."""
        value = self.body.get(name)
        return value is not None and bytes(value) not in (b"null", b"false")


_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_MESSAGES = msgspec.json.Decoder(Annotated[list[Message], Meta(min_length=1)])
_TEXTS = msgspec.json.Decoder(list[str])
_STOP = msgspec.json.Decoder(str | list[str] | None)
_LOGIT_BIAS = msgspec.json.Decoder(dict[str, float] | None)
_CACHE_SALT = msgspec.json.Decoder(Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)])


def check_encoding(coding: str | None) -> None:
    """Check a request's `Content-Encoding`. Raises `UnsupportedEncoding`: no body is decompressed."""
    if coding is not None and (refusal := encoding_refusal(coding)):
        raise UnsupportedEncoding(refusal)


def parse_request(endpoint: Endpoint, raw: bytes) -> ClientRequest:
    """Validate a request's body. Raises `InvalidRequest`, which names the invalid field."""
    try:
        check_utf8(raw)
        fields: CompletionRequest | ChatRequest
        fields = _CHAT.decode(raw) if endpoint == "chat/completions" else _COMPLETION.decode(raw)
        _check_setting("stop", fields.stop, _STOP)
        _check_setting("logit_bias", fields.logit_bias, _LOGIT_BIAS)
        _check_members(raw, fields)
        body = _FIELDS.decode(raw)
    except NOT_JSON as error:
        raise InvalidRequest.of_json(error) from error
    for name, value in (("kv_transfer_params", fields.kv_transfer_params), ("resume", fields.resume)):
        if bytes(value) not in _NOT_GIVEN:
            raise InvalidRequest(f"{name} is reserved for the proxy", param=name)
        body.pop(name, None)
    body.pop("kvferry_hints", None)
    body.pop("cache_ttl_s", None)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options is only allowed with stream=true", param="stream_options")
    n, prompts, longest = fields.n or 1, 1, None
    newer = fields.max_completion_tokens
    max_tokens = fields.max_tokens if newer is None else newer
    if isinstance(fields, ChatRequest):
        prompt = fields.messages
        _check_messages(prompt)
    else:
        prompt = fields.prompt
        prompts, longest = _count_prompts(prompt)
        if newer is not None:  # which other engines know of a chat alone
            body["max_tokens"] = body.pop("max_completion_tokens")
    if prompts * n > MAX_CHOICES:
        raise InvalidRequest(f"n times the number of prompts may be {MAX_CHOICES} at most", param="n")
    return ClientRequest(
        endpoint=endpoint,
        body=body,
        model=fields.model,
        prompt=prompt,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        include_timing=bool(fields.kvferry_timing),
        return_token_ids=bool(fields.return_token_ids),
        undivided=bool(fields.echo and fields.logprobs is not None and fields.logprobs is not False)
        or bytes(fields.prompt_logprobs) not in _NOT_GIVEN
        or max_tokens == 0,
        n=n,
        best_of=fields.best_of or 1,
        min_tokens=fields.min_tokens,
        max_tokens=max_tokens,
        seed=None if fields.seed == NO_SEED else fields.seed,
        prompts=prompts,
        prompt_tokens=longest,
        continuous_usage=bool(fields.stream_options and fields.stream_options.continuous_usage_stats),
        cache_salt=Raw() if bytes(fields.cache_salt) == b"null" else fields.cache_salt,
        hints=fields.kvferry_hints,
        priority=fields.priority or 0,
        cache_ttl_s=fields.cache_ttl_s,
    )


def salted(request: ClientRequest, salt_key: bytes) -> ClientRequest:
    """Derive the request's `cache_salt` from the key, and from its own one if it has one.

    Clients without the key cannot make that salt, whatever they send. Raises `InvalidRequest`.
    """
    own = bytes(request.cache_salt)
    try:
        text = _CACHE_SALT.decode(own) if own else ""
    except msgspec.ValidationError as error:
        raise InvalidRequest.of_field(error, "cache_salt") from error
    salt = digest(Purpose.CACHE_SALT, text, size=_CACHE_SALT_BYTES, key=salt_key)
    cache_salt = Raw(b'"%b"' % salt.hex().encode())
    body = {**request.body, "cache_salt": cache_salt}
    return msgspec.structs.replace(request, body=body, cache_salt=cache_salt)


def check_context(request: ClientRequest, max_model_len: int | None) -> None:
    """Raise `InvalidRequest` if prompt and output exceed the agents' context; None when that is unknown."""
    wanted = 1 if request.max_tokens is None else request.max_tokens
    if max_model_len is None:
        return
    if request.prompt_tokens is not None and request.prompt_tokens + wanted > max_model_len:
        raise InvalidRequest(
            f"the context length is {max_model_len} tokens; the prompt has {request.prompt_tokens} "
            f"and at least {wanted} are to be generated",
            param="prompt",
        )


class ReportedUsage(msgspec.Struct, frozen=True):
    """How many tokens a request used, as its answer reports it."""

    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    completion_tokens: Annotated[int, Meta(ge=0)] = 0


class _AnswerWithUsage(msgspec.Struct):
    usage: ReportedUsage | None = None


_ANSWER = msgspec.json.Decoder(_AnswerWithUsage)


def reported_usage(answer: bytes) -> ReportedUsage | None:
    """The usage in a complete answer, or in an event; None without one."""
    try:
        return _ANSWER.decode(answer).usage
    except NOT_JSON:
        return None


def with_usage(request: ClientRequest) -> ClientRequest:
    """The request with `stream_options` that have a stream report its usage."""
    options = msgspec.json.decode(request.body.get("stream_options", b"null"), type=dict[str, Any] | None)
    asked = Raw(msgspec.json.encode((options or {}) | {"include_usage": True}))
    return msgspec.structs.replace(
        request, body={**request.body, "stream_options": asked}, include_usage=True
    )


def split_prompts(prompt: Raw) -> list[Raw]:
    """The prompts of a completion, either all text or all token ids.

    Raises `InvalidRequest` for what is no prompt, for an empty one, and for more than `MAX_CHOICES`.
    """
    raw = bytes(prompt)
    if raw.startswith(b'"'):
        empty, prompts = raw == b'""', [prompt]
    elif not raw.startswith(b"["):
        raise _no_prompt()
    else:
        lists = _split_texts(raw) if raw.translate(None, _OF_TOKEN_IDS) else _split_ids(raw)
        empty, prompts = not lists or any(each in _EMPTY for each in lists), [Raw(each) for each in lists]
    if empty:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return prompts


def _split_ids(raw: bytes) -> list[bytes]:
    """Split a list of token ids, or of such lists: nothing but numbers, brackets and commas."""
    count = raw.count(b"[") - 1
    if count > MAX_CHOICES:
        raise _too_many_prompts()
    compact = raw.translate(None, _SPACE)
    if not count:
        return [compact]
    lists = compact[2:-2].split(b"],[")
    # Brackets at any other place would be found in another number.
    if not (len(lists) == count and compact.startswith(b"[[") and compact.endswith(b"]]")):
        raise _no_prompt()
    return [b"[%b]" % each for each in lists]


def _split_texts(raw: bytes) -> list[bytes]:
    if not raw[1:].lstrip(_SPACE).startswith(b'"'):
        raise _no_prompt()
    # The quote that opens a text has no backslash before it, so there are no more texts than these quotes.
    if raw.count(b'"') - raw.count(b'\\"') > 2 * MAX_CHOICES:
        raise _too_many_prompts()
    try:
        return [msgspec.json.encode(text) for text in _TEXTS.decode(raw)]
    except msgspec.ValidationError as error:
        raise _no_prompt() from error


def _count_prompts(prompt: Raw) -> tuple[int, int | None]:
    """The number of a completion's prompts, and the tokens of the longest if they are of token ids."""
    prompts = split_prompts(prompt)
    if bytes(prompts[0]).startswith(b'"'):
        return len(prompts), None
    return len(prompts), max(bytes(each).count(b",") for each in prompts) + 1


def _check_messages(messages: Raw) -> None:
    raw = bytes(messages)
    if raw.count(b"{") > MAX_MESSAGES_CHECKED and raw.startswith(b"["):
        return
    try:
        _MESSAGES.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest.of_field(error, "messages") from error


def _check_setting(name: str, value: Raw, decoder: msgspec.json.Decoder[object]) -> None:
    raw = bytes(value)
    if raw in _NOT_GIVEN:
        return
    if len(raw) > MAX_SETTING_BYTES:
        raise InvalidRequest(f"{name} may have at most {MAX_SETTING_BYTES} bytes", param=name)
    try:
        decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest.of_field(error, name) from error


def _check_members(raw: bytes, fields: CompletionRequest | ChatRequest) -> None:
    """Raise `InvalidRequest` for more members than a body is decoded with, counted by their colons."""
    if len(raw) <= MAX_MEMBERS:
        return
    large = (
        fields.messages if isinstance(fields, ChatRequest) else fields.prompt,
        fields.tools,
        fields.documents,
    )
    members = raw.count(b":") - sum(bytes(value).count(b":") for value in large)
    if members > MAX_MEMBERS:
        raise InvalidRequest(f"the body may have at most {MAX_MEMBERS} members")


def _no_prompt() -> InvalidRequest:
    return InvalidRequest("the prompt must be text, token ids, or a list of either", param="prompt")


def _too_many_prompts() -> InvalidRequest:
    return InvalidRequest(f"n times the number of prompts may be {MAX_CHOICES} at most", param="prompt")
