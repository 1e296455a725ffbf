# SPDX-License-Identifier: Apache-2.0
"""The native dialect (docs/architecture.md): bodies of the legs, and events made of a prefill's response.

Pure functions: ids and the clock's reading come in as arguments, and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import reject_unsupported
from kvferry.proxy.errors import NOT_JSON, BadResponse, InvalidRequest
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.kv_params import FirstToken
from kvferry.proxy.wire.messages import Register

NULL = msgspec.Raw(b"null")
DROP_PATH = "/kv/drop"


def check(request: ClientRequest) -> None:
    """Raise `InvalidRequest` for what no native agent supports."""
    if request.prompts > 1:
        raise InvalidRequest("several prompts in one request are not supported yet", param="prompt")
    reject_unsupported(request, "kvferry agents", "prompt_logprobs", "use_beam_search")


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


def alone_body(request: ClientRequest, ids: Identity) -> bytes:
    """The only leg where one agent serves the whole request."""
    return msgspec.json.encode(_whole_body(request, ids))


def prefill_body(request: ClientRequest, ids: Identity, transfer_id: TransferId) -> bytes:
    """The prefill leg: the client's own sampling settings and `n`, one token each, the KV to be kept."""
    body = {
        name: value
        for name, value in request.body.items()
        if name not in ("stream_options", "max_completion_tokens")
    }
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "client_max_tokens": request.max_tokens,
    }
    body |= {"stream": False, "max_tokens": 1, "seed": ids.seed, "kv_transfer_params": params}
    return msgspec.json.encode(body)


def decode_body(
    request: ClientRequest, ids: Identity, params: msgspec.Raw, resume: list[dict[str, Any]] | None = None
) -> bytes:
    """The decode leg: the client's own request, where the KV lies, and what the client already has of a
    stream that broke."""
    body = _whole_body(request, ids) | {"kv_transfer_params": params}
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


def streamed_body(
    request: ClientRequest,
    ids: Identity,
    prefill: Register,
    control: tuple[str, int],
    transfer_id: TransferId,
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
    return msgspec.json.encode(_whole_body(request, ids) | {"kv_transfer_params": params})


def first_tokens_event(prefill: NativePrefill) -> bytes:
    """What such a leg's stream begins with, for SSE a comment: the first tokens that it goes on from."""
    return b": first " + b",".join(b"%d" % token.id for token in prefill.first_tokens) + b"\n\n"


def _whole_body(request: ClientRequest, ids: Identity) -> dict[str, Any]:
    """The body of any last leg. Its events carry token ids, should the stream break."""
    token_lines = {"kvferry_token_lines": True} if request.stream else {}
    return {**request.body, "seed": ids.seed, **token_lines}


def drop_body(transfer_id: TransferId, incarnation: str) -> bytes:
    """Ask the prefill agent to free this transfer's KV, which will not be read."""
    return msgspec.json.encode({"transfer_id": transfer_id, "incarnation": incarnation})


class _NativeParams(msgspec.Struct, frozen=True, kw_only=True):
    do_remote_prefill: Literal[True]
    transfer_id: str
    remote_engine_id: str
    remote_host: str
    remote_port: int
    first_tokens: tuple[FirstToken, ...]


class _ChatMessage(msgspec.Struct, frozen=True):
    content: str | None = None


class _NativeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A finished choice in a whole response of either endpoint."""

    index: int
    text: str = ""
    message: _ChatMessage = _ChatMessage()
    logprobs: msgspec.Raw = NULL
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    margins: tuple[float | None, ...] = ()


class _NativeBody(msgspec.Struct, frozen=True, kw_only=True):
    choices: tuple[_NativeChoice, ...]
    usage: msgspec.Raw = NULL
    kvferry_timing: msgspec.Raw = NULL
    kv_transfer_params: msgspec.Raw = NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePrefill:
    """The result of a prefill leg: either first tokens and where their KV lies, or the whole response.

    `raw` is the response as it came. `params` go to the decode leg verbatim; None means that every choice has
    ended and nothing is pinned.
    """

    raw: bytes
    params: msgspec.Raw | None
    first_tokens: tuple[FirstToken, ...]
    whole: _NativeBody


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
    )


def first_events(
    request: ClientRequest, ids: Identity, prefill: NativePrefill, indices: frozenset[int]
) -> bytes:
    """What a streaming client gets as soon as the prefill has ended: one event for each of the choices."""
    return b"".join(
        sse.event(_chunk(request, ids, [choice]))
        for choice in _opening_choices(request, prefill)
        if choice["index"] in indices
    )


def closing_events(request: ClientRequest, ids: Identity, prefill: NativePrefill) -> bytes:
    """The rest of a stream whose prefill was the whole response: usage if asked for, and `[DONE]`."""
    last = _chunk(request, ids, [])
    if request.include_usage:
        last["usage"] = prefill.whole.usage
    if bytes(prefill.whole.kvferry_timing) != b"null":
        last["kvferry_timing"] = prefill.whole.kvferry_timing
    has_news = "kvferry_timing" in last or request.include_usage
    return (sse.event(last) if has_news else b"") + sse.DONE


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
            text = (choice.message.content or "") if request.chat else choice.text
            made = _chunk_choice(request, choice.index, text, choice.logprobs, choice.finish_reason)
            if request.return_token_ids:
                made["token_ids"] = choice.token_ids
                if choice.margins:
                    made["margins"] = choice.margins
            yield made
    for index, token in enumerate(prefill.first_tokens):
        made = _chunk_choice(request, index, token.text, token.logprobs, token.finish_reason)
        if request.return_token_ids:
            made["token_ids"] = [token.id]
            if token.logprobs is not None:
                made["margins"] = [token.margin]
        yield made


def _chunk_choice(
    request: ClientRequest,
    index: int,
    text: str,
    logprobs: msgspec.Raw | dict[str, Any] | None,
    finish_reason: str | None,
) -> dict[str, Any]:
    shown = {"delta": {"role": "assistant", "content": text}} if request.chat else {"text": text}
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
