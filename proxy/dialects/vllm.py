# SPDX-License-Identifier: Apache-2.0
"""What vLLM's connectors have in common: how a prefill leg is pared down, and how its response is parsed.

Source: vLLM 0.33.0 (docs/sources.md#vllm). A vLLM decode server samples token 1 itself, so
the prefill leg's token is discarded: what only shapes that token, or could end the response with it, is left
out. `min_tokens` of 1 masks EOS and stop ids, so that a prefill always ends by its length and hands over.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from kvferry.proxy.dialects.base import Dialect, LegRequest, SubRequest, make_leg, reject_ranking
from kvferry.proxy.dialects.fields import VLLM_FIELDS, ClientFields
from kvferry.proxy.errors import NOT_JSON, BadResponse
from kvferry.proxy.request import ClientRequest

P = TypeVar("P", bound=msgspec.Struct)

ENGINE = "vLLM servers"
HAND_OVER: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
NULL = msgspec.Raw(b"null")
FETCH: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}

_OF_NO_USE_TO_PREFILL = frozenset(
    {
        "best_of",
        "echo",
        "logprobs",
        "min_completion_tokens",
        "prompt_logprobs",
        "repetition_detection",
        "response_format",
        "return_token_ids",
        "stop",
        "stream_options",
        "structured_outputs",
        "top_logprobs",
        "use_beam_search",
    }
)


class _VllmChoice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _VllmUsage(msgspec.Struct, frozen=True):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens_details: msgspec.Raw = NULL


class VllmPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill server's response, as far as it matters.

    The values of the params stay encoded: they may name many blocks.
    """

    choices: tuple[_VllmChoice, ...]
    usage: _VllmUsage | None = None
    kv_transfer_params: dict[str, msgspec.Raw] | None = None

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length; 0 where the response does not say."""
        return self.usage.prompt_tokens if self.usage else 0

    @property
    def prompt_tokens_details(self) -> bytes:
        """The JSON in its usage that says how much of the prompt was cached there."""
        return bytes(self.usage.prompt_tokens_details if self.usage else NULL)


_PREFILL = msgspec.json.Decoder(VllmPrefill)


class VllmDialect(Dialect):
    """What all connectors share."""

    fields: ClassVar[ClientFields] = VLLM_FIELDS

    def check(self, request: ClientRequest) -> None:
        """Reject what compares choices."""
        super().check(request)
        reject_ranking(request, ENGINE)

    def alone_leg(self, sub: SubRequest, rank: int | None) -> LegRequest:
        """The client's own body."""
        return make_leg(sub, rank, msgspec.json.encode(sub.body))


def prefill_body(sub: SubRequest, params: dict[str, Any]) -> bytes:
    """The prefill leg's body: the prompt and all that changes how it is rendered, for one token."""
    return _body_for_one_token(sub, params, {"min_tokens": 1})


def opening_body(sub: SubRequest, params: dict[str, Any]) -> bytes:
    """The same with the client's own `min_tokens` and the ids, for a token that the client gets."""
    least = {"min_tokens": 1} if sub.request.min_tokens else {}
    return _body_for_one_token(sub, params, {"return_token_ids": True, **least})


def _body_for_one_token(sub: SubRequest, params: dict[str, Any], more: dict[str, Any]) -> bytes:
    body = {name: value for name, value in sub.body.items() if name not in _OF_NO_USE_TO_PREFILL}
    body |= {"stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": params, **more}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return msgspec.json.encode(body)


def decode_body(sub: SubRequest, params: dict[str, Any] | None) -> bytes:
    """The client's own body, and where the KV is; without `params` the decode server computes the prompt."""
    fetch = {} if params is None else {"kv_transfer_params": params}
    return msgspec.json.encode(sub.body | fetch)


def leased_body(sub: SubRequest, params: dict[str, Any] | None) -> bytes:
    """The same where the KV may be another prompt's by the time it is read.

    A decode server keeps what it read in its prefix cache, though the proxy discards the response. A salt of
    this attempt alone keeps that from its retry and from other requests.
    """
    fetch = {} if params is None else {"kv_transfer_params": params, "cache_salt": sub.transfer_id}
    return msgspec.json.encode(sub.body | fetch)


def read_prefill(raw: bytes) -> VllmPrefill:
    """Parse a prefill server's response. Raises `BadResponse`."""
    try:
        str(raw, "utf-8")  # usage is kept undecoded: nothing else would notice in time
        return _PREFILL.decode(raw)
    except NOT_JSON as error:
        raise BadResponse.of_json(error, "the prefill server's answer") from error


def read_params(params: dict[str, msgspec.Raw], kind: type[P]) -> P:
    """The params of a prefill server's response, as far as `kind` reads them. Raises `BadResponse`."""
    try:
        return msgspec.json.decode(msgspec.json.encode(params), type=kind)
    except NOT_JSON as error:
        raise BadResponse.of_json(error, "the prefill server's kv_transfer_params") from error


def require_length(prefill: VllmPrefill) -> None:
    """Raise `BadResponse` unless the prefill ended by its length.

    These connectors hand nothing over otherwise, and the decode server would wait for minutes (vLLM #46008).
    """
    reason = prefill.choices[0].finish_reason if prefill.choices else None
    if reason != "length":
        raise BadResponse(f"the prefill server ended with {reason!r} and hands no KV over")
