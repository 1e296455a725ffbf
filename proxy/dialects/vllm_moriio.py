# SPDX-License-Identifier: Apache-2.0
"""vLLM with MoRIIOConnector: READ is serial, WRITE runs both legs at once; and its ping.

Source: vLLM 0.33.0, `moriio_toy_proxy_server.py` and `moriio_connector.py` (docs/sources.md#vllm-moriio); one
msgpack map every 3 s. Both servers find each other's addresses in the request id, which is the same on both
legs. Not taken over from the toy proxy: one rank for both legs, which the smaller server may not have, and a
token less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from kvferry.proxy.dialects import vllm
from kvferry.proxy.dialects.base import (
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Prefilled,
    SubRequest,
    make_leg,
)
from kvferry.proxy.errors import BadResponse
from kvferry.proxy.wire.dialects import VLLM_MORIIO
from kvferry.proxy.wire.engine_servers import foreign_registration
from kvferry.proxy.wire.registration import BadFrame, Register, Role

_ROLES: dict[str, Role] = {"P": "prefill", "D": "decode"}


class _MoriioPing(msgspec.Struct, frozen=True):
    type: Literal["P", "D"]
    http_address: str
    zmq_address: str
    dp_size: int
    tp_size: int
    transfer_mode: Literal["READ", "WRITE"]


def recognises(body: dict[str, Any]) -> bool:
    """Whether this map is a MoRIIO ping (right or wrong in its details)."""
    return body.get("type") in tuple(_ROLES) and "http_address" in body


def registration(body: dict[str, Any]) -> Register:
    """Convert a MoRIIO ping to a registration; what it does not say stays empty. Raises `BadFrame`."""
    try:
        ping = msgspec.convert(body, _MoriioPing)
    except ValueError as error:
        raise BadFrame(str(error)) from error
    return foreign_registration(
        role=_ROLES[ping.type],
        # It has no incarnation, so a restart cannot be distinguished from a late ping.
        incarnation=f"{VLLM_MORIIO}:{ping.http_address}",
        address=f"http://{ping.http_address}",
        # "host:IP,handshake:PORT,notify:PORT": goes into request ids as it is.
        control=ping.zmq_address,
        dialect=VLLM_MORIIO,
        tp_size=ping.tp_size,
        dp_size=ping.dp_size,
        transfer_mode="read" if ping.transfer_mode == "READ" else "write",
    )


class _MoriioParams(msgspec.Struct, frozen=True):
    transfer_id: str


@dataclass(frozen=True, kw_only=True)
class VllmMoriio(vllm.VllmDialect):
    """`lease_s` is the prefill servers' `defer_timeout`: they report neither that nor what has expired."""

    lease_s: float | None
    name: ClassVar[str] = VLLM_MORIIO
    has_leases: ClassVar[bool] = True
    lease_flag: ClassVar[str] = "--moriio-lease-s"

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """As the prefill server was configured."""
        return LegOrder.CONCURRENT if endpoints.prefill.transfer_mode == "write" else LegOrder.SERIAL

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """The decode server's sizes, so that its ranks are waited for."""
        params = vllm.HAND_OVER | {
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_dp_size": endpoints.decode.dp_size,
            "remote_tp_size": endpoints.decode.tp_size,
            "transfer_id": _transfer_id(sub),
        }
        return make_leg(
            sub,
            endpoints.prefill_rank,
            vllm.prefill_body(sub, params),
            request_id=_request_id(sub, endpoints),
        )

    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """It hands over only when it ended by its length."""
        prefill = vllm.read_prefill(raw)
        vllm.require_length(prefill)
        params = prefill.kv_transfer_params
        if params is not None and vllm.read_params(params, _MoriioParams).transfer_id != _transfer_id(sub):
            raise BadResponse("the prefill server answered for another transfer")
        return Prefilled(params=params, prompt_tokens_details=prefill.prompt_tokens_details)

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """READ: the prefill's params verbatim. WRITE: what can be known before its response."""
        params: dict[str, Any] | None
        is_write = self.leg_order(endpoints, kv_endpoint) is LegOrder.CONCURRENT
        if is_write:
            params = vllm.FETCH | {
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_dp_rank": endpoints.prefill_rank or 0,
                "transfer_id": _transfer_id(sub),
            }
        else:
            params = prefilled.params
        if params is not None:
            sizes = {"remote_dp_size": endpoints.prefill.dp_size, "remote_tp_size": endpoints.prefill.tp_size}
            params = params | sizes
        body = vllm.decode_body(sub, params) if is_write else vllm.leased_body(sub, params)
        return make_leg(sub, endpoints.decode_rank, body, request_id=_request_id(sub, endpoints))


def _transfer_id(sub: SubRequest) -> str:
    return f"tx-{sub.transfer_id}"


def _request_id(sub: SubRequest, endpoints: Endpoints) -> str:
    """Both control addresses and 32 hex digits. Nothing of the client's, which could hold such a mark."""
    prefill, decode = endpoints.prefill.control, endpoints.decode.control
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{sub.transfer_id}"
