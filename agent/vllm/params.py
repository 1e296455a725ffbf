# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params` as vLLM hands them to its connector: what a request asks of the transfer plane.

The field names are vLLM's own (docs/architecture.md#one-request). Clients may send anything, so whatever is
not one of these requests is an error; fields that vLLM or another router added are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.agent.ids import MAX_ID_CHARS
from kvferry.proxy.wire.dialects import MAX_KEEP_S
from kvferry.transfer.plane import RemotePrompt

MAX_HOST_CHARS = 255
"""As in the DNS."""
_TransferId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS, pattern="^[!-~]+$")]
_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class BadParams(ValueError):
    """The request's `kv_transfer_params` are not what a proxy sends."""


class RemoteServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that may have a prompt's KV."""

    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    remote_host: Annotated[str, Meta(min_length=1, max_length=MAX_HOST_CHARS)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_tp_size: _Count
    remote_dp_rank: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0

    def prompt(self, num_tokens: int) -> RemotePrompt:
        """So many tokens of one, as the transfer plane addresses them."""
        return RemotePrompt(
            engine_id=self.remote_engine_id,
            host=self.remote_host,
            port=self.remote_port,
            num_tokens=num_tokens,
            tp_size=self.remote_tp_size,
            dp_rank=self.remote_dp_rank,
        )


class LenderAddress(RemoteServer, frozen=True, kw_only=True):
    """It may have kept the prompt's beginning. Fewer than `min_tokens` that are missing here are not worth
    asking for.
    """

    min_tokens: _Count


class LendPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill leg: keep the prompt's KV for a reader.

    `first_token`: the reader goes on after the token that is sampled here. `prefix_source`: from where the
    prompt's beginning may be pulled.
    """

    transfer_id: _TransferId
    first_token: bool = False
    prefix_source: LenderAddress | None = None


class FetchPrompt(RemoteServer, frozen=True, kw_only=True):
    """A decode leg: the prompt's KV is at a prefill server.

    `keep_s`: for how many seconds the KV of the prompt and the answer is kept after the end, to be lent to
    who computes the next turn. `keep_for`: the client, by an id of its API key; "" for all without one.
    """

    transfer_id: _TransferId
    remote_num_tokens: _Count
    keep_s: Annotated[float, Meta(ge=0.0, le=MAX_KEEP_S)] = 0.0
    keep_for: Annotated[str, Meta(max_length=64)] = ""

    @property
    def source(self) -> RemotePrompt:
        return self.prompt(self.remote_num_tokens)


class DropPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """At the prefill server: no reader needs the KV any more."""

    transfer_id: _TransferId


PromptTask = LendPrompt | FetchPrompt | DropPrompt


def read_params(params: object) -> PromptTask | None:
    """What a request's params ask for; None if nothing. Raises `BadParams`."""
    if params is None:
        return None
    if not isinstance(params, dict):
        raise BadParams("not an object")
    flags = {name: params.get(name) for name in ("do_remote_decode", "do_remote_prefill", "drop")}
    for name, value in flags.items():
        if value not in (None, True, False):
            raise BadParams(f"{name} is not true or false")
    if flags["do_remote_decode"] and flags["do_remote_prefill"]:
        raise BadParams("a leg is prefill or decode, not both")
    kind: type[PromptTask]
    if flags["do_remote_decode"]:
        kind = LendPrompt
    elif flags["do_remote_prefill"]:
        kind = DropPrompt if flags["drop"] else FetchPrompt
    else:
        return None
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise BadParams(str(error)) from error


def lent_params(
    *,
    transfer_id: str,
    engine_id: str,
    host: str,
    port: int,
    num_tokens: int,
    tp_size: int,
    dp_rank: int,
    continuable: bool,
) -> dict[str, Any]:
    """What a prefill server answers: a decode leg's params, to be sent as they are.

    `continuable` is for the proxy: whether the answer can go on from token ids alone
    (`kvferry.agent.vllm.identity.is_continuable`).
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_host": host,
        "remote_port": port,
        "remote_num_tokens": num_tokens,
        "remote_tp_size": tp_size,
        "remote_dp_rank": dp_rank,
        "continuable": continuable,
    }
