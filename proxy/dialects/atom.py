# SPDX-License-Identifier: Apache-2.0
"""ATOM: serial; the decode server begins its response with the prefill's first token. And its ping.

Source: ATOM at 0c982ea92, `proxy.py` and `kv_transfer_engine.py`, and its later `first_token_id`
(docs/sources.md#atom); one msgpack map every 5 s. The prefill server's token is
the response's, so it is sampled with the client's own settings, and a response may end there. Not taken over
from the original proxy: chat sent to `/v1/completions`, `Bearer None`, and a token less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.proxy.dialects.base import (
    Dialect,
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Prefilled,
    SubRequest,
    foreign_registration,
    make_leg,
    reject_ranking,
    reject_unsupported,
)
from kvferry.proxy.errors import NOT_JSON, BadResponse
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.messages import BadFrame, Register, Role, TransferMode

NAME = "atom"
_ENGINE = "ATOM servers"
_ROLES: dict[str, Role] = {"P": "prefill", "D": "decode"}


class _AtomPing(msgspec.Struct, frozen=True):
    type: Literal["register"]
    role: Literal["P", "D"]
    index: int | str
    request_address: str
    handshake_port: int
    dp_size: int
    tp_size: int
    transfer_mode: TransferMode


def recognises(body: dict[str, Any]) -> bool:
    """Whether this map is an ATOM ping (right or wrong in its details)."""
    return body.get("type") == "register" and "request_address" in body


def registration(body: dict[str, Any]) -> Register:
    """Convert an ATOM ping to a registration; what it does not say stays empty. Raises `BadFrame`."""
    try:
        ping = msgspec.convert(body, _AtomPing)
        url = urlsplit(ping.request_address)
    except ValueError as error:
        raise BadFrame(str(error)) from error
    address = f"{url.scheme}://{url.netloc}"
    return foreign_registration(
        role=_ROLES[ping.role],
        # It has no incarnation, so a restart cannot be distinguished from a late ping; and as its counter
        # begins anew with a restart, it is ignored.
        incarnation=f"{NAME}:{address}",
        address=address,
        control=f"tcp://{url.hostname}:{ping.handshake_port}",
        dialect=NAME,
        tp_size=ping.tp_size,
        dp_size=ping.dp_size,
        transfer_mode=ping.transfer_mode,
    )


class _AtomChoice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _AtomBody(msgspec.Struct, frozen=True, kw_only=True):
    choices: tuple[_AtomChoice, ...]
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Atom(Dialect):
    """Without logprobs: those of token 1 stay behind at the prefill server."""

    name: ClassVar[str] = NAME

    def check(self, request: ClientRequest) -> None:
        """Also reject what would lack its first position, or need both servers to know the whole prompt."""
        reject_ranking(request, _ENGINE)
        reject_unsupported(request, _ENGINE, "logprobs", "top_logprobs", "prompt_logprobs", "echo")

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """The decode leg needs the first token."""
        return LegOrder.SERIAL

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """The client's own sampling settings, for one token."""
        body = {name: value for name, value in sub.body.items() if name != "stream_options"}
        body |= {"stream": False, "n": 1, "max_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        if isinstance(body.get("min_tokens"), int):
            # More than one token cannot be asked for; one is as much as keeps a response from ending here.
            body["min_tokens"] = min(body["min_tokens"], 1)
        body["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            **_where(endpoints.decode),
        }
        return make_leg(sub, endpoints.prefill_rank, msgspec.json.encode(body))

    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """A response that ended at its first token is complete, whatever was kept for a decode leg."""
        try:
            response = msgspec.json.decode(raw, type=_AtomBody)
        except NOT_JSON as error:
            raise BadResponse(f"the prefill server's answer cannot be read: {error}") from error
        if len(response.choices) != 1:
            raise BadResponse(
                f"the prefill server answered {len(response.choices)} choices where one was due"
            )
        params = response.kv_transfer_params
        if response.choices[0].finish_reason not in (None, "length"):
            return Prefilled(params=params, whole=raw)
        if params is None:
            raise BadResponse("the prefill server answered without kv_transfer_params")
        return Prefilled(params=params)

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """The prefill's params, `first_token_id` among them, and where it is."""
        assert prefilled.params is not None
        chosen = {} if endpoints.prefill_rank is None else {"remote_dp_rank": endpoints.prefill_rank}
        fetch = {"do_remote_decode": False, "do_remote_prefill": True, **_where(endpoints.prefill)}
        # The rank that the response names is the one that holds the KV.
        body = sub.body | {"kv_transfer_params": chosen | prefilled.params | fetch}
        return make_leg(sub, endpoints.decode_rank, msgspec.json.encode(body))

    def alone_leg(self, sub: SubRequest, rank: int | None) -> LegRequest:
        """The client's own body."""
        return make_leg(sub, rank, msgspec.json.encode(sub.body))


def _where(server: Register) -> dict[str, Any]:
    """A server as its partner finds it: host and HTTP port (as text), handshake port and sizes."""
    http, handshake = urlsplit(server.address), urlsplit(server.control)
    return {
        "remote_host": http.hostname,
        "remote_port": str(http.port),
        "remote_handshake_port": handshake.port,
        "remote_dp_size": server.dp_size,
        "remote_tp_size": server.tp_size,
    }
