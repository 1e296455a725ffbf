# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params` and `resume`, which a proxy sends with each leg, and what a prefill leg returns.

The field names are those of vLLM and ATOM (docs/architecture.md#one-request), so that one proxy can serve
several engines; this side fills or reads only what the native dialect needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.agent.errors import bad_request
from kvferry.agent.ids import MAX_ID_CHARS, is_plain_id
from kvferry.agent.messages.requests import PrefixSource, RemoteKV, ResumedChoice
from kvferry.proxy.wire.kv_params import FirstToken, TokenId
from kvferry.transfer.plane import RemotePrompt

_PARAM = "kv_transfer_params"
MAX_HOST_CHARS = 255
"""As in the DNS."""
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What a client already has of one choice whose stream broke elsewhere: its output ids, all of them.

    The text shown is a function of the ids alone (`agent.api.text.detokenizer`); why a choice ended is not.
    """

    output_ids: Annotated[list[TokenId], Meta(min_length=1)]
    finish_reason: Literal["stop", "length"] | None = None


class PrefixSourceParams(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that may have the KV of the prompt's beginning (`messages.PrefixSource`)."""

    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    remote_host: Annotated[str, Meta(min_length=1, max_length=MAX_HOST_CHARS)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_tp_size: _Count
    min_tokens: _Count

    def source(self) -> PrefixSource:
        return PrefixSource(
            engine_id=self.remote_engine_id,
            host=self.remote_host,
            port=self.remote_port,
            tp_size=self.remote_tp_size,
            min_tokens=self.min_tokens,
        )


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """Both directions in one map: a prefill leg sets `do_remote_decode`, a decode leg `do_remote_prefill`.

    A decode leg with `streamed` was sent beside its prefill leg: it encodes the prompt itself, and its pull
    brings the first tokens. A prefill leg may take the prompt's beginning from `prefix_source`.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    streamed: bool = False
    transfer_id: str | None = None
    client_max_tokens: _Count | None = None
    remote_engine_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)] | None = None
    remote_host: Annotated[str, Meta(max_length=MAX_HOST_CHARS)] | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    remote_num_tokens: _Count | None = None
    remote_tp_size: _Count | None = None
    remote_dp_rank: Annotated[int, Meta(ge=0)] | None = None
    remote_cached_tokens: Annotated[int, Meta(ge=0)] | None = None
    first_tokens: list[FirstToken] | None = None
    prompt_token_ids: list[TokenId] | None = None
    prefix_source: PrefixSourceParams | None = None

    def check(self, num_choices: int, stream: bool) -> None:
        """Raise `ApiError` 400 where fields that belong together are not all there."""
        if self.do_remote_decode and self.do_remote_prefill:
            raise bad_request("a leg is prefill or decode, not both", _PARAM)
        if not (self.do_remote_decode or self.do_remote_prefill):
            return
        if self.transfer_id is None or not is_plain_id(self.transfer_id):
            message = f"transfer_id must be 1 to {MAX_ID_CHARS} printable characters"
            raise bad_request(message, f"{_PARAM}.transfer_id")
        if self.do_remote_decode and stream:
            raise bad_request("a prefill leg is not streamed", "stream")
        if self.do_remote_prefill:
            self._check_decode_leg(num_choices)

    def _check_decode_leg(self, num_choices: int) -> None:
        known_later = ("remote_num_tokens", "first_tokens", "prompt_token_ids")
        needed = ("remote_engine_id", "remote_host", "remote_port", "remote_tp_size")
        for name in needed if self.streamed else (*needed, *known_later):
            if getattr(self, name) is None:
                raise bad_request(f"{name} is missing", f"{_PARAM}.{name}", "missing_field")
        if self.streamed:
            for name in known_later:
                if getattr(self, name) is not None:
                    message = f"{name} is not known while the prefill runs"
                    raise bad_request(message, f"{_PARAM}.{name}")
            return
        if len(self.first_tokens or ()) != num_choices:
            raise bad_request(f"first_tokens must have n = {num_choices} entries", f"{_PARAM}.first_tokens")
        if all(token.finish_reason for token in self.first_tokens or ()):
            raise bad_request("every choice is finished already", f"{_PARAM}.first_tokens")
        if len(self.prompt_token_ids or ()) != self.remote_num_tokens:
            message = "prompt_token_ids must have remote_num_tokens entries"
            raise bad_request(message, f"{_PARAM}.prompt_token_ids")

    def remote(self, num_tokens: int) -> RemoteKV:
        """Return where a decode leg pulls the KV of its prompt of `num_tokens` from. Only after `check`."""
        assert self.transfer_id and self.remote_engine_id and self.remote_host and self.remote_port
        assert self.remote_tp_size
        return RemoteKV(
            transfer_id=self.transfer_id,
            source=RemotePrompt(
                engine_id=self.remote_engine_id,
                host=self.remote_host,
                port=self.remote_port,
                num_tokens=num_tokens,
                tp_size=self.remote_tp_size,
                dp_rank=self.remote_dp_rank or 0,
            ),
            streamed=self.streamed,
        )

    def resumed_choices(self, resume: Sequence[Resume] | None) -> tuple[ResumedChoice, ...]:
        """Return the tokens to continue from; none while the prefill runs. Only after `check`."""
        known = resume or [
            Resume(output_ids=[token.id], finish_reason=token.finish_reason)
            for token in self.first_tokens or ()
        ]
        return tuple(
            ResumedChoice(
                index=index, token_ids=tuple(choice.output_ids), finished=choice.finish_reason is not None
            )
            for index, choice in enumerate(known)
        )


def check_resume(resume: Sequence[Resume], params: KVTransferParams | None, stream: bool) -> None:
    """Raise `ApiError` 400 unless `resume` continues the first tokens of `params`."""
    if params is None or not params.do_remote_prefill or not stream:
        raise bad_request("only a streamed decode leg can resume", "resume")
    if [each.output_ids[0] for each in resume] != [token.id for token in params.first_tokens or ()]:
        raise bad_request("resume must begin with the first token of every choice", "resume")


def prefill_response_params(
    *,
    transfer_id: str,
    incarnation: str,
    host: str,
    port: int,
    tp_size: int,
    cached_tokens: int,
    first_tokens: list[FirstToken],
    prompt_ids: tuple[int, ...],
) -> dict[str, Any]:
    """Return the params of a prefill response of which some choice continues elsewhere."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": incarnation,
        "remote_host": host,
        "remote_port": port,
        "remote_num_tokens": len(prompt_ids),
        "remote_tp_size": tp_size,
        "remote_dp_rank": 0,
        "remote_cached_tokens": cached_tokens,
        "first_tokens": msgspec.to_builtins(first_tokens),
        "prompt_token_ids": list(prompt_ids),
    }
