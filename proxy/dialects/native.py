# SPDX-License-Identifier: Apache-2.0
"""The native dialect (docs/architecture.md): our own agents.

An agent samples all choices of a prompt from one transfer, and sends the client's own events and responses
(`Dialect.is_native`). The prefill agent's first tokens are the client's; a decode agent goes on from what
the client has (`SentTokens`). Its leg may be sent early, together with the prefill leg, and waits for the KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects.base import (
    Dialect,
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Prefilled,
    SubRequest,
    reject_cache_ttl,
)
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import NOT_JSON, BadResponse, InvalidRequest
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.dialects import NATIVE_DIALECT
from kvferry.proxy.wire.kv_params import FirstToken, running_usage
from kvferry.proxy.wire.registration import Incarnation, Register

NULL = msgspec.Raw(b"null")
DROP_PATH = "/kv/drop"
_RESERVED = ("kvferry_first_choice", "kvferry_token_lines")
_NOT_FOR_PREFILL = frozenset({"stream_options", "max_completion_tokens"})


@dataclass(frozen=True, kw_only=True)
class Native(Dialect):
    """Our agents."""

    name: ClassVar[str] = NATIVE_DIALECT
    forks: ClassVar[bool] = True
    is_native: ClassVar[bool] = True
    drop_status: ClassVar[int] = 200

    def check(self, request: ClientRequest) -> None:
        """Also reject fields by which the proxy and agents understand each other."""
        for name in _RESERVED:
            if request.asks_for(name):
                raise InvalidRequest(f"{name} is reserved for the proxy", param=name)
        if request.asks_for("use_beam_search"):
            raise InvalidRequest(
                "use_beam_search is not supported with kvferry agents", param="use_beam_search"
            )
        reject_cache_ttl(request, self.name)
        # An agent would say so too, but only of the decode leg: the prefill leg is not streamed.
        if request.continuous_usage and not request.include_usage:
            message = "continuous_usage_stats needs include_usage to be true"
            raise InvalidRequest(message, param="stream_options")

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """Early, if that is wanted and the prefill agent can be found before it has answered."""
        is_early = endpoints.early and control_address(endpoints.prefill) is not None
        return LegOrder.EARLY if is_early else LegOrder.SERIAL

    def alone_leg(self, sub: SubRequest, rank: int | None) -> LegRequest:
        """The client's own body; events count choices from the sub-request's first."""
        return _leg(sub, _whole_body(sub))

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """The client's own sampling settings and `n`, one token each, the KV to be kept."""
        body = {name: value for name, value in _client_body(sub).items() if name not in _NOT_FOR_PREFILL}
        params: dict[str, Any] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": sub.transfer_id,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "client_max_tokens": sub.request.max_tokens,
        }
        if endpoints.prefix_source is not None:
            params["prefix_source"] = endpoints.prefix_source
        body |= {"stream": False, "max_tokens": 1, "seed": sub.ids.seed, "kv_transfer_params": params}
        return _leg(sub, body)

    def read_prefill(self, sub: SubRequest, raw: bytes) -> NativePrefilled:
        """First tokens and where their KV lies, or the whole response, with nothing pinned."""
        try:
            answer = msgspec.json.decode(raw, type=_NativeBody)
            if bytes(answer.kv_transfer_params) == b"null":
                params = None
            else:
                params = msgspec.json.decode(answer.kv_transfer_params, type=_NativeParams)
        except NOT_JSON as error:
            raise BadResponse.of_json(error, "the prefill agent's answer") from error
        tokens = () if params is None else params.first_tokens
        num_choices, asked = len(answer.choices) if params is None else len(tokens), len(sub.choices)
        if num_choices != asked:
            raise BadResponse(
                f"the prefill agent answered {num_choices} choices where {asked} were asked for"
            )
        if params is not None and params.transfer_id != sub.transfer_id:
            raise BadResponse("the prefill agent answered for another transfer")
        return NativePrefilled(
            params=None if params is None else answer.kv_transfer_params,
            whole=raw if params is None else None,
            answer=answer,
            first_tokens=tokens,
            prompt_tokens=_prompt_tokens(answer) if params is None else params.remote_num_tokens,
        )

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """The client's own body, and where the KV lies."""
        return _leg(sub, _whole_body(sub) | {"kv_transfer_params": prefilled.params})

    def early_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """The client's own body, and where the KV will lie."""
        control = control_address(endpoints.prefill)
        assert control is not None, "the order would not be early"
        host, port = control
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "streamed": True,
            "transfer_id": sub.transfer_id,
            "remote_engine_id": endpoints.prefill.incarnation,
            "remote_host": host,
            "remote_port": port,
            "remote_tp_size": endpoints.prefill.tp_size,
            "remote_dp_rank": 0,
        }
        return _leg(sub, _whole_body(sub) | {"kv_transfer_params": params})

    def early_event(self, prefilled: Prefilled) -> bytes:
        """For SSE a comment: the first tokens that the stream goes on from."""
        assert isinstance(prefilled, NativePrefilled)
        return b": first " + b",".join(b"%d" % token.id for token in prefilled.first_tokens) + b"\n\n"

    def opening_events(self, sub: SubRequest, prefilled: Prefilled, sent: SentTokens) -> bytes | None:
        """One event for each choice whose first token the client has not; they are noted."""
        if not sub.request.stream:
            return None
        assert isinstance(prefilled, NativePrefilled)
        return first_events(sub, prefilled, sent.begin(prefilled.first_tokens))

    def continued_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, sent: SentTokens
    ) -> LegRequest:
        """The decode leg with what the client has, if that is more than first tokens."""
        body = _whole_body(sub) | {"kv_transfer_params": prefilled.params}
        resume = sent.resume()
        if resume is not None:
            body["resume"] = resume
        return _leg(sub, body)

    def drop_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """Free this transfer's KV, which will not be read."""
        return drop_request(sub.transfer_id, endpoints.prefill.incarnation)

    def prefix_source(self, lender: Register, min_tokens: int) -> dict[str, Any] | None:
        """Where a prefill agent finds the lender."""
        return prefix_source(lender, min_tokens)


def drop_request(transfer_id: TransferId, incarnation: Incarnation) -> LegRequest:
    """Ask a prefill agent to free a transfer's KV."""
    body = msgspec.json.encode({"transfer_id": transfer_id, "incarnation": incarnation})
    return LegRequest(path=DROP_PATH, headers={"Content-Type": "application/json"}, body=body)


def prefix_source(lender: Register, min_tokens: int) -> dict[str, Any] | None:
    """Where a lender is found; None if its registration does not say it."""
    control = control_address(lender)
    if control is None:
        return None
    host, port = control
    return {
        "remote_engine_id": lender.incarnation,
        "remote_host": host,
        "remote_port": port,
        "remote_tp_size": lender.tp_size,
        "min_tokens": min_tokens,
    }


def control_address(agent: Register) -> tuple[str, int] | None:
    """Host and port of an agent's control channel; None if its registration has none that can be parsed."""
    try:
        control = urlsplit(agent.control)
        host, port = control.hostname, control.port
    except ValueError:
        return None
    return (host, port) if host and port else None


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


def _leg(sub: SubRequest, body: dict[str, Any]) -> LegRequest:
    path = f"/v1/{sub.request.endpoint}"
    return LegRequest(path=path, headers=headers(sub.ids), body=msgspec.json.encode(body))


def _client_body(sub: SubRequest) -> dict[str, Any]:
    hints = sub.request.hints
    body = {**sub.body, "kvferry_hints": hints} if bytes(hints) else sub.body
    # It is for the proxy's queue; agents have none.
    return {name: value for name, value in body.items() if name != "priority"} if "priority" in body else body


def _whole_body(sub: SubRequest) -> dict[str, Any]:
    """The body of any decode leg. Its events carry token ids, should the stream break."""
    body = {**_client_body(sub), "seed": sub.ids.seed}
    if sub.request.stream:
        body["kvferry_token_lines"] = True
        if sub.choices.start:
            body["kvferry_first_choice"] = sub.choices.start
    return body


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
    stop_reason: str | int | None = None
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


def require_whole(raw: bytes, sub: SubRequest) -> None:
    """Raise `BadResponse` unless a last leg's response, not streamed, has every choice with its end."""
    try:
        str(raw, "utf-8")  # what is passed on undecoded is not looked at otherwise
        choices = msgspec.json.decode(raw, type=_WholeBody).choices
    except NOT_JSON as error:
        raise BadResponse.of_json(error, "the agent's answer") from error
    if len(choices) != len(sub.choices):
        asked = len(sub.choices)
        raise BadResponse(f"the agent answered {len(choices)} choices where {asked} were asked for")


class NativePrefilled(Prefilled, frozen=True, kw_only=True):
    """The result of a prefill leg. There are first tokens where it is not the whole response."""

    answer: _NativeBody
    first_tokens: tuple[FirstToken, ...]


def _prompt_tokens(answer: _NativeBody) -> int:
    try:
        usage = msgspec.json.decode(answer.usage, type=_PromptUsage | None)
    except NOT_JSON as error:
        raise BadResponse.of_json(error, "the prefill agent's usage") from error
    return 0 if usage is None else usage.prompt_tokens


def first_events(sub: SubRequest, prefilled: NativePrefilled, indices: frozenset[int]) -> bytes:
    """What a streaming client gets as soon as the prefill has ended: one event for each of the choices."""
    request, events = sub.request, []
    for choice in _opening_choices(request, prefilled):
        if choice["index"] in indices:
            choice["index"] += sub.choices.start
            chunk = _chunk(sub, [choice])
            if request.continuous_usage:
                chunk["usage"] = running_usage(prefilled.prompt_tokens, 1)
            events.append(sse.event(chunk))
    return b"".join(events)


def closing_events(sub: SubRequest, prefilled: NativePrefilled) -> bytes:
    """The rest of a stream whose prefill was the whole response: usage if asked for, and `[DONE]`."""
    last = _chunk(sub, [])
    if sub.request.include_usage:
        last["usage"] = prefilled.answer.usage
    if bytes(prefilled.answer.kvferry_timing) != b"null":
        last["kvferry_timing"] = prefilled.answer.kvferry_timing
    has_news = "kvferry_timing" in last or sub.request.include_usage
    return (sse.event(last) if has_news else b"") + sse.DONE


def last_event(event: bytes) -> LastEvent | None:
    """An event that has no choices; None for any other. Raises `BadResponse`."""
    try:
        read = msgspec.json.decode(sse.data(event) or b"{}", type=LastEvent)
    except NOT_JSON as error:
        raise BadResponse.of_json(error, "the agent's event") from error
    return read if read.choices == () else None


def envelope(sub: SubRequest, last: LastEvent) -> dict[str, Any]:
    """What is around the usage of several prompts, where `last` ended the stream of one."""
    timing = {} if bytes(last.kvferry_timing) == b"null" else {"kvferry_timing": last.kvferry_timing}
    return _chunk(sub, []) | timing


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


def _opening_choices(request: ClientRequest, prefilled: NativePrefilled) -> Iterator[dict[str, Any]]:
    if prefilled.params is None:
        for choice in prefilled.answer.choices:
            shown = {"delta": choice.message.as_delta()} if request.chat else {"text": choice.text}
            made = _chunk_choice(
                choice.index, shown, choice.logprobs, choice.finish_reason, choice.stop_reason
            )
            if request.return_token_ids:
                made["token_ids"] = choice.token_ids
                if choice.margins:
                    made["margins"] = choice.margins
            yield made
    for index, token in enumerate(prefilled.first_tokens):
        delta = token.delta or {"role": "assistant", "content": token.text}
        shown = {"delta": delta} if request.chat else {"text": token.text}
        reason = "tool_calls" if token.called and token.finish_reason == "stop" else token.finish_reason
        made = _chunk_choice(index, shown, token.logprobs, reason, token.stop_reason)
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
    stop_reason: str | int | None,
) -> dict[str, Any]:
    made = {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish_reason}
    return made if finish_reason is None else {**made, "stop_reason": stop_reason}


def _chunk(sub: SubRequest, choices: list[dict[str, Any]]) -> dict[str, Any]:
    request = sub.request
    return {
        "id": sub.ids.answer_id,
        "object": "chat.completion.chunk" if request.chat else "text_completion",
        "created": sub.ids.created,
        "model": request.model,
        "choices": choices,
    }
