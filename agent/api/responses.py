# SPDX-License-Identifier: Apache-2.0
"""Response bodies and stream events in OpenAI's shapes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.agent.api.generation import Delta, Generation, GenerationRequest, TokenUsage
from kvferry.agent.api.message.message_parser import MessageDelta
from kvferry.agent.messages.requests import Timing
from kvferry.proxy.wire.kv_params import FirstToken, running_usage

DONE_EVENT = b"data: [DONE]\n\n"
_END_LINE = b": t end\n"
_OBJECT = {"completion": "text_completion", "chat": "chat.completion"}
_CHUNK_OBJECT = {"completion": "text_completion", "chat": "chat.completion.chunk"}


def completion(
    generation: Generation, choices: Sequence[Delta], kv_params: dict[str, Any] | None
) -> dict[str, Any]:
    """Make the body of a whole response. `choices` have all tokens, in order of their index.

    A choice that continues elsewhere (a prefill leg's) ends with "length" here: its one token was asked for.
    """
    request = generation.request
    body = _head(request, _OBJECT)
    body["choices"] = [_choice_body(request, choice) for choice in choices]
    body["usage"] = usage_body(generation.token_usage)
    if request.prompt_logprobs is not None:
        scored = generation.shown_prompt_logprobs
        for holder in [body] if request.kind == "chat" else body["choices"]:
            holder["prompt_logprobs"] = scored
    if kv_params is not None:
        body["kv_transfer_params"] = kv_params
    if request.want_timing and generation.timing is not None:
        body["kvferry_timing"] = msgspec.to_builtins(generation.timing)
    return body


def delta_event(request: GenerationRequest, delta: Delta) -> bytes:
    """Make the stream event of a delta; empty when it has nothing for a client.

    The token line, for a proxy that asked for them, is there in either case.
    """
    line = token_line(delta) if request.token_lines and delta.token_ids else b""
    opens_message = request.kind == "chat" and delta.first
    shown = bool(delta.text if delta.message is None else delta.message)
    if not (shown or delta.finish_reason or delta.logprobs or opens_message or request.return_token_ids):
        return line and line + b"\n"
    body = _head(request, _CHUNK_OBJECT)
    body["choices"] = [_chunk_choice(request, delta)]
    if request.continuous_usage:
        body["usage"] = running_usage(len(request.prompt_ids), delta.num_tokens)
    return line + sse_event(body)


def first_tokens_event(deltas: Sequence[Delta]) -> bytes:
    """Make `: first ID,ID…`, an event without data: token 1 of every choice, which the prefill leg shows.

    A proxy that sent both legs at once checks with it that they have the same first tokens.
    """
    ids = ",".join(str(delta.token_ids[0]) for delta in sorted(deltas, key=lambda delta: delta.index))
    return f": first {ids}\n\n".encode()


def token_line(delta: Delta) -> bytes:
    """Make `: t CHOICE ID,ID…[ FINISH_REASON]`: what a proxy must know to resume this stream elsewhere.

    In SSE a line that begins with a colon is a comment, which clients skip.
    """
    ids = ",".join(map(str, delta.token_ids))
    end = f" {delta.finish_reason}" if delta.finish_reason else ""
    return f": t {delta.index} {ids}{end}\n".encode()


def last_event(generation: Generation) -> bytes:
    """Make the event without choices that ends a stream: usage and timing; empty if neither was asked for.

    The end line, for a proxy that asked for token lines, is there in either case.
    """
    request = generation.request
    extras: dict[str, Any] = {}
    if request.include_usage:
        extras["usage"] = usage_body(generation.token_usage)
    if request.want_timing and generation.timing is not None:
        extras["kvferry_timing"] = msgspec.to_builtins(generation.timing)
    line = _END_LINE if request.token_lines else b""
    if not extras:
        return line and line + b"\n"
    return line + sse_event({**_head(request, _CHUNK_OBJECT), "choices": [], **extras})


def sse_event(body: dict[str, Any]) -> bytes:
    """Encode one server-sent event. An infinite margin becomes null: JSON has no infinity."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage_body(usage: TokenUsage) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def first_token_entry(delta: Delta) -> FirstToken:
    """Make a choice's entry in the params of a prefill response."""
    return FirstToken(
        id=delta.token_ids[0],
        text=delta.text,
        logprobs=delta.logprobs,
        margin=delta.margins[0] if delta.margins else None,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        called=delta.called,
        delta=None if delta.message is None else _opening(delta.message),
    )


def server_timing(timing: Timing) -> str:
    """Make the `Server-Timing` header (W3C): phases in milliseconds."""
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in timing.phases().items())


def _head(request: GenerationRequest, objects: dict[str, str]) -> dict[str, Any]:
    return {
        "id": request.answer_id,
        "object": objects[request.kind],
        "created": request.created,
        "model": request.model,
    }


def _choice_body(request: GenerationRequest, delta: Delta) -> dict[str, Any]:
    content: dict[str, Any]
    if delta.message is not None:
        content = {"message": delta.message.whole_body()}
    elif request.kind == "chat":
        content = {"message": {"role": "assistant", "content": delta.text}}
    else:
        content = {"text": delta.text}
    ended = {"finish_reason": _finish_reason(delta) or "length", "stop_reason": delta.stop_reason}
    return _with_tokens(request, delta, {**content, **ended})


def _finish_reason(delta: Delta) -> str | None:
    return "tool_calls" if delta.called and delta.finish_reason == "stop" else delta.finish_reason


def _opening(message: MessageDelta) -> dict[str, Any]:
    """Make the first delta of a message: as in OpenAI's, its content is null where it begins otherwise."""
    return {"role": "assistant", "content": None, **message.body()}


def _chunk_choice(request: GenerationRequest, delta: Delta) -> dict[str, Any]:
    content: dict[str, Any]
    if delta.message is not None:
        content = {"delta": _opening(delta.message) if delta.first else delta.message.body()}
    elif request.kind == "chat":
        role = {"role": "assistant"} if delta.first else {}
        text = {"content": delta.text} if delta.text or delta.first else {}
        content = {"delta": {**role, **text}}
    else:
        content = {"text": delta.text}
    shown = _with_tokens(request, delta, {**content, "finish_reason": _finish_reason(delta)})
    if delta.finish_reason is not None:
        shown["stop_reason"] = delta.stop_reason
    shown["index"] += request.first_choice
    return shown


def _with_tokens(request: GenerationRequest, delta: Delta, choice: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": delta.index, **choice, "logprobs": delta.logprobs}
    if request.return_token_ids:
        choice["token_ids"] = delta.token_ids
    if request.want_margins:
        choice["margins"] = delta.margins
    return choice
