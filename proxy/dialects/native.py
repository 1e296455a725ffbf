# SPDX-License-Identifier: Apache-2.0
"""The native dialect (docs/architecture.md): bodies of the legs, and events made of a prefill's response.

Pure functions: ids and the clock's reading come in as arguments, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import reject_unsupported
from kvferry.proxy.errors import NOT_JSON, BadResponse, InvalidRequest
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.kv_params import FirstToken, running_usage
from kvferry.proxy.wire.registration import Register

NULL = msgspec.Raw(b"null")
DROP_PATH = "/kv/drop"
_RESERVED = ("kvferry_first_choice", "kvferry_token_lines")


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


_STREAM_OPTIONS = msgspec.json.Decoder(_StreamOptions | None)


def check(request: ClientRequest) -> None:
    """Raise `InvalidRequest` for what no native agent supports."""
    for name in _RESERVED:
        if request.asks_for(name):
            raise InvalidRequest(f"{name} is reserved for the proxy", param=name)
    reject_unsupported(request, "kvferry agents", "use_beam_search")
    # An agent would say so too, but only of the decode leg: the prefill leg is not streamed.
    try:
        _STREAM_OPTIONS.decode(request.body.get("stream_options", NULL))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"stream_options: {error}", param="stream_options") from error
    if request.continuous_usage and not request.include_usage:
        message = "continuous_usage_stats needs include_usage to be true"
        raise InvalidRequest(message, param="stream_options")


def path(request: ClientRequest) -> str:
    """The path of every leg."""
    return f"/v1/{request.endpoint}"


def headers(ids: Identity) -> dict[str, str]:
    """The headers of every leg: all agents log one request id and respond under one id."""
    made = {
        "Content-Type": "application/json",
        "X-Request-Id": ids.request_id,
        "X-Kvferry-Answer-Id": ids.answer_id,
        "X-Kvferry-Created": str(ids.created),
    }
    if ids.traceparent is not None:
        made["traceparent"] = ids.traceparent
    return made


def alone_body(request: ClientRequest, ids: Identity, first_choice: int = 0) -> bytes:
    """The only leg where one agent serves the whole request; its events count choices from `first_choice`."""
    return msgspec.json.encode(_whole_body(request, ids, first_choice))


def prefill_body(
    request: ClientRequest,
    ids: Identity,
    transfer_id: TransferId,
    prefix_source: dict[str, Any] | None = None,
) -> bytes:
    """The prefill leg: the client's own sampling settings and `n`, one token each, the KV to be kept.

    `prefix_source` (`prefix_source_params`) is whom the agent may ask for the KV of the prompt's beginning.
    """
    body = {
        name: value
        for name, value in request.body.items()
        if name not in ("stream_options", "max_completion_tokens")
    }
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "client_max_tokens": request.max_tokens,
    }
    if prefix_source is not None:
        params["prefix_source"] = prefix_source
    body |= {"stream": False, "max_tokens": 1, "seed": ids.seed, "kv_transfer_params": params}
    return msgspec.json.encode(body)


def decode_body(
    request: ClientRequest,
    ids: Identity,
    params: msgspec.Raw,
    resume: list[dict[str, Any]] | None = None,
    first_choice: int = 0,
) -> bytes:
    """The decode leg: the client's own request, where the KV lies, and what the client already has of a
    stream that broke."""
    body = _whole_body(request, ids, first_choice) | {"kv_transfer_params": params}
    if resume is not None:
        body["resume"] = resume
    return msgspec.json.encode(body)


def control_address(prefill: Register) -> tuple[str, int] | None:
    """Host and port of an agent's control channel; None if its registration has none that can be parsed."""
    try:
        control = urlsplit(prefill.control)
        host, port = control.hostname, control.port
    except ValueError:
        return None
    return (host, port) if host and port else None


def prefix_source_params(source: Register, min_tokens: int) -> dict[str, Any] | None:
    """Where a prefill agent finds `source`, which may lend it KV if it lacks at least so many tokens."""
    control = control_address(source)
    if control is None:
        return None
    host, port = control
    return {
        "remote_engine_id": source.incarnation,
        "remote_host": host,
        "remote_port": port,
        "remote_tp_size": source.tp_size,
        "min_tokens": min_tokens,
    }


def streamed_body(
    request: ClientRequest,
    ids: Identity,
    prefill: Register,
    control: tuple[str, int],
    transfer_id: TransferId,
    first_choice: int = 0,
) -> bytes:
    """The decode leg that is sent together with its prefill leg: where the KV will lie, and no more."""
    host, port = control
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "streamed": True,
        "transfer_id": transfer_id,
        "remote_engine_id": prefill.incarnation,
        "remote_host": host,
        "remote_port": port,
        "remote_tp_size": prefill.tp_size,
        "remote_dp_rank": 0,
    }
    return msgspec.json.encode(_whole_body(request, ids, first_choice) | {"kv_transfer_params": params})


def first_tokens_event(prefill: NativePrefill) -> bytes:
    """What such a leg's stream begins with, for SSE a comment: the first tokens that it goes on from."""
    return b": first " + b",".join(b"%d" % token.id for token in prefill.first_tokens) + b"\n\n"


def _whole_body(request: ClientRequest, ids: Identity, first_choice: int) -> dict[str, Any]:
    """The body of any last leg. Its events carry token ids, should the stream break."""
    body = {**request.body, "seed": ids.seed}
    if request.stream:
        body["kvferry_token_lines"] = True
        if first_choice:
            body["kvferry_first_choice"] = first_choice
    return body


def drop_body(transfer_id: TransferId, incarnation: str) -> bytes:
    """Ask the prefill agent to free this transfer's KV, which will not be read."""
    return msgspec.json.encode({"transfer_id": transfer_id, "incarnation": incarnation})


class _NativeParams(msgspec.Struct, frozen=True, kw_only=True):
    do_remote_prefill: Literal[True]
    transfer_id: str
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int = 0
    first_tokens: tuple[FirstToken, ...]


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[dict[str, msgspec.Raw], ...] = ()

    def as_delta(self) -> dict[str, Any]:
        """The message as the only delta of a stream."""
        calls = [{"index": index, **call} for index, call in enumerate(self.tool_calls)]
        reasoning = {} if self.reasoning_content is None else {"reasoning_content": self.reasoning_content}
        called = {"tool_calls": calls} if calls else {}
        return {"role": "assistant", "content": self.content, **reasoning, **called}


class _NativeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A finished choice in a whole response of either endpoint."""

    index: int
    text: str = ""
    message: _ChatMessage = _ChatMessage()
    logprobs: msgspec.Raw = NULL
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    margins: tuple[float | None, ...] = ()


class _PromptUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _NativeBody(msgspec.Struct, frozen=True, kw_only=True):
    choices: tuple[_NativeChoice, ...]
    usage: msgspec.Raw = NULL
    kvferry_timing: msgspec.Raw = NULL
    kv_transfer_params: msgspec.Raw = NULL


class _EndedChoice(msgspec.Struct, frozen=True):
    finish_reason: str


class _WholeBody(msgspec.Struct, frozen=True):
    choices: tuple[_EndedChoice, ...]


def require_whole(raw: bytes, request: ClientRequest) -> None:
    """Raise `BadResponse` unless a last leg's response, not streamed, has every choice with its end."""
    try:
        str(raw, "utf-8")  # what is passed on undecoded is not looked at otherwise
        choices = msgspec.json.decode(raw, type=_WholeBody).choices
    except NOT_JSON as error:
        raise BadResponse(f"the agent's answer cannot be read: {error}") from error
    if len(choices) != request.n:
        raise BadResponse(f"the agent answered {len(choices)} choices where {request.n} were asked for")


class NativePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a prefill leg: either first tokens and where their KV lies, or the whole response.

    `raw` is the response as it came. `params` go to the decode leg verbatim; None means that every choice has
    ended and nothing is pinned.
    """

    raw: bytes
    params: msgspec.Raw | None
    first_tokens: tuple[FirstToken, ...]
    whole: _NativeBody
    prompt_tokens: int


def read_prefill(raw: bytes, request: ClientRequest, transfer_id: TransferId) -> NativePrefill:
    """Parse the prefill leg's response. Raises `BadResponse` if it is not of this dialect or attempt."""
    try:
        whole = msgspec.json.decode(raw, type=_NativeBody)
        if bytes(whole.kv_transfer_params) == b"null":
            params = None
        else:
            params = msgspec.json.decode(whole.kv_transfer_params, type=_NativeParams)
    except NOT_JSON as error:
        raise BadResponse(f"the prefill agent's answer cannot be read: {error}") from error
    tokens = () if params is None else params.first_tokens
    num_choices = len(whole.choices) if params is None else len(tokens)
    if num_choices != request.n:
        raise BadResponse(
            f"the prefill agent answered {num_choices} choices where {request.n} were asked for"
        )
    if params is not None and params.transfer_id != transfer_id:
        raise BadResponse("the prefill agent answered for another transfer")
    return NativePrefill(
        raw=raw,
        params=None if params is None else whole.kv_transfer_params,
        first_tokens=tokens,
        whole=whole,
        prompt_tokens=_prompt_tokens(whole) if params is None else params.remote_num_tokens,
    )


def _prompt_tokens(whole: _NativeBody) -> int:
    try:
        usage = msgspec.json.decode(whole.usage, type=_PromptUsage | None)
    except NOT_JSON as error:
        raise BadResponse(f"the prefill agent's usage cannot be read: {error}") from error
    return 0 if usage is None else usage.prompt_tokens


def first_events(
    request: ClientRequest,
    ids: Identity,
    prefill: NativePrefill,
    indices: frozenset[int],
    first_choice: int = 0,
) -> bytes:
    """What a streaming client gets as soon as the prefill has ended: one event for each of the choices."""
    events = []
    for choice in _opening_choices(request, prefill):
        if choice["index"] in indices:
            choice["index"] += first_choice
            chunk = _chunk(request, ids, [choice])
            if request.continuous_usage:
                chunk["usage"] = running_usage(prefill.prompt_tokens, 1)
            events.append(sse.event(chunk))
    return b"".join(events)


def closing_events(request: ClientRequest, ids: Identity, prefill: NativePrefill) -> bytes:
    """The rest of a stream whose prefill was the whole response: usage if asked for, and `[DONE]`."""
    last = _chunk(request, ids, [])
    if request.include_usage:
        last["usage"] = prefill.whole.usage
    if bytes(prefill.whole.kvferry_timing) != b"null":
        last["kvferry_timing"] = prefill.whole.kvferry_timing
    has_news = "kvferry_timing" in last or request.include_usage
    return (sse.event(last) if has_news else b"") + sse.DONE


class WholePart(msgspec.Struct, frozen=True):
    """One prompt's whole response. `choices` is the inside of a JSON list."""

    envelope: dict[str, msgspec.Raw]
    choices: bytes
    usage: dict[str, Any] | None


def part_of_whole(raw: bytes, first_choice: int) -> WholePart:
    """Read one prompt's whole response and count its choices from `first_choice`. Raises `BadResponse`."""
    try:
        whole = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        choices = msgspec.json.decode(whole.pop("choices"), type=list[dict[str, msgspec.Raw]])
        usage = msgspec.json.decode(whole.pop("usage", NULL), type=dict[str, Any] | None)
    except (*NOT_JSON, LookupError) as error:
        raise BadResponse(f"the agent's answer cannot be read: {error}") from error
    for index, choice in enumerate(choices, start=first_choice):
        choice["index"] = msgspec.Raw(b"%d" % index)
    return WholePart(whole, msgspec.json.encode(choices)[1:-1], usage)


def joined(parts: Sequence[WholePart], usage: dict[str, Any] | None) -> bytes:
    """The whole response of several prompts."""
    choices = b",".join(part.choices for part in parts)
    return msgspec.json.encode(
        {**parts[0].envelope, "choices": msgspec.Raw(b"[%b]" % choices), "usage": usage}
    )


def last_event(event: bytes) -> LastEvent | None:
    """An event that has no choices; None for any other. Raises `BadResponse`."""
    try:
        read = msgspec.json.decode(sse.data(event) or b"{}", type=LastEvent)
    except NOT_JSON as error:
        raise BadResponse(f"the agent's event cannot be read: {error}") from error
    return read if read.choices == () else None


def joined_closing_events(
    request: ClientRequest, ids: Identity, usage: dict[str, Any] | None, timing: msgspec.Raw
) -> bytes:
    """The end of a stream of several prompts: their usage and a timing, if asked for, and `[DONE]`."""
    extras: dict[str, Any] = {"usage": usage} if request.include_usage else {}
    if bytes(timing) != b"null":
        extras["kvferry_timing"] = timing
    return (sse.event({**_chunk(request, ids, []), **extras}) if extras else b"") + sse.DONE


class LastEvent(msgspec.Struct, frozen=True):
    """What an agent's stream may end with. Errors have no `choices` at all."""

    choices: tuple[msgspec.Raw, ...] | None = None
    usage: dict[str, Any] | None = None
    kvferry_timing: msgspec.Raw = NULL


class _AgentError(msgspec.Struct, frozen=True):
    message: str = "no reason given"
    type: str = ""


class _ErrorEvent(msgspec.Struct, frozen=True):
    error: _AgentError


def agent_failure(events: bytes) -> tuple[bytes, str] | None:
    """The events before one that reports a failure of the agent itself, and its message; None without such.

    An error of the request itself would be any agent's, and passes.
    """
    if not sse.has_error(events):
        return None
    before, mark, rest = events.partition(sse.ERROR_EVENT)
    try:
        error = msgspec.json.decode(
            (mark + rest).partition(sse.END_OF_EVENT)[0].removeprefix(b"data: "), type=_ErrorEvent
        ).error
    except NOT_JSON:
        return None
    return (before, error.message) if error.type == "server_error" else None


def _opening_choices(request: ClientRequest, prefill: NativePrefill) -> Iterator[dict[str, Any]]:
    if prefill.params is None:
        for choice in prefill.whole.choices:
            shown = {"delta": choice.message.as_delta()} if request.chat else {"text": choice.text}
            made = _chunk_choice(choice.index, shown, choice.logprobs, choice.finish_reason)
            if request.return_token_ids:
                made["token_ids"] = choice.token_ids
                if choice.margins:
                    made["margins"] = choice.margins
            yield made
    for index, token in enumerate(prefill.first_tokens):
        delta = token.delta or {"role": "assistant", "content": token.text}
        shown = {"delta": delta} if request.chat else {"text": token.text}
        made = _chunk_choice(index, shown, token.logprobs, token.shown_finish_reason)
        if request.return_token_ids:
            made["token_ids"] = [token.id]
            if token.logprobs is not None:
                made["margins"] = [token.margin]
        yield made


def _chunk_choice(
    index: int,
    shown: dict[str, Any],
    logprobs: msgspec.Raw | dict[str, Any] | None,
    finish_reason: str | None,
) -> dict[str, Any]:
    return {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish_reason}


def _chunk(request: ClientRequest, ids: Identity, choices: list[dict[str, Any]]) -> dict[str, Any]:
    chunk: dict[str, Any] = {
        "id": ids.answer_id,
        "object": "chat.completion.chunk" if request.chat else "text_completion",
        "created": ids.created,
        "model": request.model,
        "choices": choices,
    }
    if request.include_usage:
        chunk["usage"] = None
    return chunk
