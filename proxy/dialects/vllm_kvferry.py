# SPDX-License-Identifier: Apache-2.0
"""vLLM with our own connector (`agent/vllm/`): prefill, then decode with the params of its response.

The decode server computes on KV only after the prefill server's proof, and recomputes the prompt or fails
otherwise, so nothing has to be judged here. vLLM samples the choices of one prompt from one transfer: with
n > 1 the first choice fetches it, and the others find it in the decode server's prefix cache.

A stream of one choice begins with the prefill's token where that is sure to be right: the decode server gets
the prompt and that token as ids, and goes on from token 2, so that no token is sampled twice. In the same way
another server goes on with a stream whose decode server was lost. The leg is one of `/v1/completions`, a
chat's too: its choices become a chat's here. `may_continue` says for which requests that is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects import vllm
from kvferry.proxy.dialects.base import (
    ContinuedChoice,
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Opening,
    Prefilled,
    SubRequest,
    make_leg,
)
from kvferry.proxy.dialects.native import prefix_source
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import NOT_JSON, BadResponse
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.dialects import VLLM_KVFERRY
from kvferry.proxy.wire.registration import Register

_NO_SUCH_MODEL = "kvferry/drop"
"""A vLLM server takes the params of a request that it rejects to its connector, and computes nothing."""
_COMPLETIONS = "/v1/completions"
_DEFAULT_LIMIT = 16
"""vLLM's `max_tokens` of a completion that has none."""
_SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "cache_salt",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "model",
        "priority",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
        "user",
    }
)
"""Fields that mean the same when tokens that were sampled are part of the prompt."""
_OF_THE_PROMPT = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "messages",
        "prompt",
    }
)
_COUNTED = frozenset({"best_of", "max_completion_tokens", "max_tokens", "min_tokens", "n"})
"""`may_continue` looks at them."""
_CONTINUED = _SAMPLING | _OF_THE_PROMPT | _COUNTED
_NOT_GIVEN = frozenset({b"null", b"false", b"[]", b'""', b"{}"})
_ZERO_IS_NONE = frozenset({"presence_penalty", "frequency_penalty"})


class _LentParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode server needs to find the KV; without any of it, it would compute the prompt unasked."""

    do_remote_prefill: bool
    transfer_id: str
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int
    remote_tp_size: int
    continuable: bool = False
    """Whether ids are all that an answer to this prompt depends on."""


class _OpeningMessage(msgspec.Struct, frozen=True):
    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[msgspec.Raw, ...] | None = None

    @property
    def text(self) -> str | None:
        """None where it is more than text."""
        return None if self.reasoning or self.reasoning_content or self.tool_calls else self.content


class _OpeningChoice(msgspec.Struct, frozen=True, kw_only=True):
    text: str | None = None
    message: _OpeningMessage | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: msgspec.Raw = vllm.NULL


class _OpeningAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill server's answer with ids: a completion has the prompt's in its choice, a chat beside it."""

    model: str
    choices: tuple[_OpeningChoice]
    usage: dict[str, Any]
    prompt_token_ids: msgspec.Raw = vllm.NULL


_ANSWER = msgspec.json.Decoder(_OpeningAnswer)
_IDS = msgspec.json.Decoder(tuple[int, ...] | None)


@dataclass(frozen=True, kw_only=True)
class VllmKvferry(vllm.VllmDialect):
    """The connector's `kv_transfer_params`: docs/engines/vllm.md.

    `keep_turns_s`: for how long a decode server keeps the KV of a prompt and its answer, to be lent, unless
    the client says how long.
    """

    name: ClassVar[str] = VLLM_KVFERRY
    forks: ClassVar[bool] = True
    keeps_turns: ClassVar[bool] = True
    keep_turns_s: float = 0.0

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """Where the KV is stands in the prefill's response."""
        return LegOrder.SERIAL

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """One choice for one token, whatever n is."""
        shows_first = self.may_continue(sub)
        params = vllm.HAND_OVER | {"transfer_id": sub.transfer_id, "first_token": shows_first}
        if endpoints.prefix_source is not None:
            params["prefix_source"] = endpoints.prefix_source
        make = vllm.opening_body if shows_first else vllm.prefill_body
        return make_leg(sub, endpoints.prefill_rank, make(sub, params))

    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """The response's params, as they are; without any, the decode server has to compute the prompt."""
        prefill = vllm.read_prefill(raw)
        lent, lender = None, ""
        if prefill.kv_transfer_params is not None:
            lent = vllm.read_params(prefill.kv_transfer_params, _LentParams)
            lender = lent.remote_engine_id
        opening = None
        if self.may_continue(sub):
            opening = _read_opening(sub, raw, lent is not None and lent.continuable)
        return Prefilled(
            params=prefill.kv_transfer_params,
            opening=opening,
            lender=lender,
            prompt_tokens=prefill.prompt_tokens,
        )

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """The client's own body with the prefill's params."""
        return make_leg(sub, endpoints.decode_rank, vllm.decode_body(sub, self._fetch(sub, prefilled)))

    def _fetch(self, sub: SubRequest, prefilled: Prefilled) -> dict[str, Any] | None:
        """The prefill's params, verbatim, and for how long and for whom to keep what comes of them."""
        request = sub.request
        default_s = min(self.keep_turns_s, request.max_cache_ttl_s)
        keep_s = default_s if request.cache_ttl_s is None else request.cache_ttl_s
        kept = {"keep_s": keep_s, "keep_for": request.key.hex()} if keep_s else {}
        return None if prefilled.params is None else {**prefilled.params, **kept}

    def prefix_source(self, lender: Register, min_tokens: int) -> dict[str, Any] | None:
        """The lender's control channel, and which of several data-parallel ranks it is."""
        source = prefix_source(lender, min_tokens)
        return None if source is None else source | {"remote_dp_rank": lender.dp_rank or 0}

    def may_continue(self, sub: SubRequest) -> bool:
        """One streamed choice whose next token depends on nothing but the ids before it.

        Not with a seed, unless the temperature is 0: vLLM begins its random numbers anew. Not with what looks
        at tokens of the output alone (penalties, stop strings, grammars, bad words), or at more than one
        token's text (tools, reasoning).
        """
        request, body = sub.request, sub.body
        return (
            request.stream
            and request.sequences == 1
            and not request.continuous_usage
            and not request.return_token_ids
            and (request.seed is None or _is_zero(body.get("temperature")))
            and (request.chat or (request.max_tokens is None) == ("max_tokens" not in body))
            and all(name in _CONTINUED or _is_unset(name, value) for name, value in body.items())
        )

    def opening_events(self, sub: SubRequest, prefilled: Prefilled, sent: SentTokens) -> bytes | None:
        """Those that a decode server would stream of the token, if the server says how to go on after it."""
        if prefilled.opening is None:
            return None
        return b"" if sent.begun else prefilled.opening.events or None

    def continued_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, sent: SentTokens
    ) -> LegRequest | None:
        """A completion whose prompt is the ids of the prompt and of the tokens that the client has.

        None where the decode server might refuse it for its length, or the request for its own.
        """
        opening, room = prefilled.opening, endpoints.decode.max_model_len
        if opening is None or not room:
            return None
        ids = sent.ids or opening.first_id
        request, done, most = sub.request, ids.count(b",") + 1, room - opening.usage["prompt_tokens"]
        default = most if request.chat else _DEFAULT_LIMIT
        limit = default if request.max_tokens is None else request.max_tokens
        if not done < limit <= most or (request.min_tokens or 0) > limit:
            return None
        body = {name: value for name, value in sub.body.items() if name in _SAMPLING}
        body |= {
            "prompt": msgspec.Raw(opening.prompt_ids[:-1] + b"," + ids + b"]"),
            "max_tokens": limit - done,
            "return_token_ids": True,
        }
        if request.min_tokens:
            body["min_tokens"] = max(0, request.min_tokens - done)
        if (fetch := self._fetch(sub, prefilled)) is not None:
            body["kv_transfer_params"] = fetch
        leg = make_leg(sub, endpoints.decode_rank, msgspec.json.encode(body))
        return msgspec.structs.replace(leg, path=_COMPLETIONS)

    def read_continued(self, request: ClientRequest, choice: dict[str, msgspec.Raw]) -> ContinuedChoice:
        """A completion's choice without its ids; of a chat, as a chat's."""
        if "text" not in choice:
            return ContinuedChoice(choice, b"", False)
        ids = _IDS.decode(choice.get("token_ids", vllm.NULL)) or ()
        text = choice["text"]
        if request.chat:
            shown = {"index": choice["index"], "delta": msgspec.Raw(b'{"content":%b}' % bytes(text))}
            shown |= {name: choice.get(name, vllm.NULL) for name in ("logprobs", "finish_reason")}
            if bytes(shown["finish_reason"]) != b"null":
                shown["stop_reason"] = choice.get("stop_reason", vllm.NULL)
        else:
            shown = choice | {"prompt_token_ids": vllm.NULL, "token_ids": vllm.NULL}
        return ContinuedChoice(shown, b",".join(b"%d" % each for each in ids), bytes(text) != b'""')

    def drop_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """A request that the prefill server rejects (404), with params that have it end the lease."""
        params: dict[str, Any] = {"do_remote_prefill": True, "drop": True, "transfer_id": sub.transfer_id}
        body = {"model": _NO_SUCH_MODEL, "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
        leg = make_leg(sub, endpoints.prefill_rank, msgspec.json.encode(body))
        return msgspec.structs.replace(leg, path=_COMPLETIONS)


def _is_unset(name: str, value: Any) -> bool:
    return bytes(value) in _NOT_GIVEN or (name in _ZERO_IS_NONE and _is_zero(value))


def _is_zero(value: Any) -> bool:
    try:
        return value is not None and float(bytes(value)) == 0
    except ValueError:
        return False


def _read_opening(sub: SubRequest, raw: bytes, continuable: bool) -> Opening | None:
    """None where the answer has no ids. Raises `BadResponse`."""
    try:
        answer = _ANSWER.decode(raw)
    except NOT_JSON as error:
        raise BadResponse.of_json(error, "the prefill server's answer") from error
    (choice,) = answer.choices
    prompt_ids = bytes(answer.prompt_token_ids if sub.request.chat else choice.prompt_token_ids)
    if not prompt_ids.startswith(b"[") or prompt_ids == b"[]":
        return None
    if not isinstance(answer.usage.get("prompt_tokens"), int):
        return None
    has_ended = choice.finish_reason == "stop"
    text = choice.message.text if choice.message is not None else choice.text
    # Without text, the token is half of a character: its other half comes with the next, from one server.
    can_show = continuable and (has_ended or (choice.finish_reason == "length" and bool(text)))
    ids = choice.token_ids or ()
    if not can_show or len(ids) != 1:
        return Opening(prompt_ids=prompt_ids, first_id=b"", events=b"", has_ended=False, usage=answer.usage)
    return Opening(
        prompt_ids=prompt_ids,
        first_id=b"%d" % ids[0],
        events=_first_events(sub.request, answer, choice, text or ""),
        has_ended=has_ended,
        usage=answer.usage,
    )


def _first_events(request: ClientRequest, answer: _OpeningAnswer, choice: _OpeningChoice, text: str) -> bytes:
    """What a decode server would stream of the token; a chat's begins with its role."""
    has_ended = choice.finish_reason == "stop"
    sampled = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": "stop" if has_ended else None,
        "stop_reason": choice.stop_reason,
        "prompt_token_ids": None,
        "token_ids": choice.token_ids,
    }
    chunks: list[dict[str, Any]] = [{"choices": [sampled]}]
    if request.chat:
        delta = {"role": "assistant" if choice.message is None else choice.message.role, "content": ""}
        chunks.insert(0, {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]})
    if has_ended and request.include_usage:
        chunks.append({"choices": [], "usage": answer.usage})
    kind = "chat.completion.chunk" if request.chat else "text_completion"
    envelope = {"id": "", "object": kind, "created": 0, "model": answer.model}
    return b"".join(sse.event(envelope | chunk) for chunk in chunks)
