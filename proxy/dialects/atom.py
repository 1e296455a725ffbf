# SPDX-License-Identifier: Apache-2.0
"""ATOM: serial; the decode server begins its response with the prefill's first token. And its discovery.

Source: ATOM at 0c982ea92 (`proxy.py`, `kv_transfer_engine.py`) and at ffdf3bb5d (`moriio_connector.py`,
`mooncake_connector.py`, `api_server.py`), both run (docs/sources.md#atom). Until July 2026 servers ping, one
msgpack map every 5 s; later ones answer `GET /kv_transfer_info` instead. The prefill server's token is the
response's, so it is sampled with the client's own settings, and a response may end there. Not taken over
from the original proxy: chat sent to `/v1/completions`, `Bearer None`, and a token less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.common.engine_servers.atom import MAX_PARALLEL
from kvferry.proxy.dialects.base import (
    Dialect,
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Prefilled,
    SubRequest,
    make_leg,
    reject_ranking,
    reject_unsupported,
)
from kvferry.proxy.dialects.fields import ATOM_FIELDS, ClientFields
from kvferry.proxy.errors import NOT_JSON, BadResponse
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.dialects import ATOM
from kvferry.proxy.wire.engine_servers import ATOM_WITHOUT_INFO, foreign_registration
from kvferry.proxy.wire.registration import BadFrame, Register, Role, TransferMode

_ENGINE = "ATOM servers"
_ROLES: dict[str, Role] = {"P": "prefill", "D": "decode"}
_TO_BE_CONTINUED = frozenset({"max_tokens", "length"})
"""Finish reasons of a prefill that reached its limit; chat says `length`."""
_REASONS = {"max_tokens": "length", "eos": "stop", "stop_sequence": "stop"}
_STOP_TOKEN = "stop_"
"""A finish reason that names the stop token goes on with its id."""
_FAILED = ("aborted", "unschedulable")
"""How finish reasons begin by which ATOM says, under HTTP 200, that a choice has failed."""

_NULL = msgspec.Raw(b"null")


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
        incarnation=f"{ATOM}:{address}",
        address=address,
        control=f"tcp://{url.hostname}:{ping.handshake_port}",
        dialect=ATOM,
        version=ATOM_WITHOUT_INFO,
        tp_size=ping.tp_size,
        dp_size=ping.dp_size,
        transfer_mode=ping.transfer_mode,
    )


class _AtomChoice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _AtomUsage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _AtomParams(msgspec.Struct, frozen=True):
    """What must not be missing: a decode server would read another rank's or another prompt's KV."""

    remote_block_ids: list[int]
    transfer_id: int
    dp_rank: Annotated[int, Meta(ge=0, lt=MAX_PARALLEL)]


class _AtomBody(msgspec.Struct, frozen=True, kw_only=True):
    choices: tuple[_AtomChoice, ...]
    usage: _AtomUsage | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Atom(Dialect):
    """Without logprobs: those of token 1 stay behind at the prefill server.

    A prefill server keeps the KV of everything that it computes until a decode server has fetched it, and
    there is no lease: it serves nothing alone (`wire.dialects`).
    """

    name: ClassVar[str] = ATOM
    fields: ClassVar[ClientFields] = ATOM_FIELDS

    def check(self, request: ClientRequest) -> None:
        """Also reject what would lack its first position, or need both servers to know the whole prompt."""
        super().check(request)
        reject_ranking(request, _ENGINE)
        reject_unsupported(request, _ENGINE, "logprobs", "top_logprobs", "prompt_logprobs", "echo")

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """The decode leg needs the first token, whichever side moves the KV."""
        return LegOrder.SERIAL

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest | None:
        """The client's own sampling settings, for one token.

        None for chat at servers `ATOM_WITHOUT_INFO`: their chat route drops `kv_transfer_params`, so KV that
        a prefill server kept could not be fetched.
        """
        if sub.request.chat and endpoints.prefill.version == ATOM_WITHOUT_INFO:
            return None
        body = _body(sub, endpoints.prefill_rank)
        body.pop("stream_options", None)
        body |= {"stream": False, "n": 1, "max_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        if sub.request.min_tokens is not None:
            # More than one token cannot be asked for; one is as much as keeps a response from ending here.
            body["min_tokens"] = min(sub.request.min_tokens, 1)
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
            if response.kv_transfer_params is not None:
                msgspec.convert(response.kv_transfer_params, _AtomParams)
        except NOT_JSON as error:
            raise BadResponse.of_json(error, "the prefill server's answer") from error
        if len(response.choices) != 1:
            raise BadResponse(
                f"the prefill server answered {len(response.choices)} choices where one was due"
            )
        reason = response.choices[0].finish_reason
        if reason is not None and self.client_reason(reason) is None:
            raise BadResponse(f"the prefill server ended with {reason!r}")
        if response.usage is not None and response.usage.completion_tokens == 0:
            # Chat says `stop` for whatever went wrong; a response that ended by itself has its last token.
            raise BadResponse("the prefill server sampled no token")
        ended = reason not in (None, *_TO_BE_CONTINUED) or sub.request.max_tokens == 1
        return Prefilled(params=response.kv_transfer_params, whole=raw if ended else None)

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """The prefill's params, `first_token_id` among them; where it is goes by what it says itself.

        Without params the decode server computes the prompt again.
        """
        body = _body(sub, endpoints.decode_rank)
        if prefilled.params is not None:
            body["kv_transfer_params"] = _where(endpoints.prefill) | prefilled.params | {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                # The rank that holds the KV, which need not be the one that was asked.
                "remote_dp_rank": prefilled.params.get("dp_rank"),
            }  # fmt: skip
        return make_leg(sub, endpoints.decode_rank, msgspec.json.encode(body))

    def client_reason(self, reason: str) -> str | None:
        """ATOM's own words as OpenAI's."""
        if reason.startswith(_FAILED):
            return None
        if reason.startswith(_STOP_TOKEN):
            return "stop"
        return super().client_reason(_REASONS.get(reason, reason))

    def alone_leg(self, sub: SubRequest, rank: int | None) -> LegRequest:
        """The client's own body."""
        return make_leg(sub, rank, msgspec.json.encode(_body(sub, rank)))


def _body(sub: SubRequest, rank: int | None) -> dict[str, Any]:
    """The client's body as ATOM reads it: the rank, stop strings only in a list, one limit under both names.

    Before June 2026 `max_completion_tokens` was not known, and 8,192 tokens were taken to be wanted.
    """
    body = dict(sub.body)
    stop, limit = (bytes(body.get(name, _NULL)) for name in ("stop", "max_completion_tokens"))
    if stop.startswith(b'"'):
        body["stop"] = msgspec.Raw(b"[" + stop + b"]")
    if limit != b"null":
        body["max_tokens"] = msgspec.Raw(limit)
    if rank is not None:
        body["data_parallel_rank"] = rank
    return body


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
