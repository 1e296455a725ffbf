# SPDX-License-Identifier: Apache-2.0
"""vLLM with our own connector (`agent/vllm/`): prefill, then decode with the params of its response.

The decode server computes on KV only after the prefill server's proof, and recomputes the prompt or fails
otherwise, so nothing has to be judged here. vLLM samples the choices of one prompt from one transfer: with
n > 1 the first choice fetches it, and the others find it in the decode server's prefix cache.
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
)
from kvferry.proxy.dialects.names import VLLM_KVFERRY

_NO_SUCH_MODEL = "kvferry/drop"
"""A vLLM server takes the params of a request that it rejects to its connector, and computes nothing."""


class _LentParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode server needs to find the KV; without any of it, it would compute the prompt unasked."""

    do_remote_prefill: bool
    transfer_id: str
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int
    remote_tp_size: int


@dataclass(frozen=True, kw_only=True)
class VllmKvferry(vllm.VllmDialect):
    """The connector's `kv_transfer_params`: docs/engines/vllm.md."""

    name: ClassVar[str] = VLLM_KVFERRY
    forks: ClassVar[bool] = True

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """Where the KV is stands in the prefill's response."""
        return LegOrder.SERIAL

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """One choice for one token, whatever n is."""
        body = vllm.prefill_body(sub, vllm.HAND_OVER | {"transfer_id": sub.transfer_id})
        return make_leg(sub, endpoints.prefill_rank, body)

    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """The response's params, as they are; without any, the decode server has to compute the prompt."""
        prefill = vllm.read_prefill(raw)
        if prefill.kv_transfer_params is None:
            return Prefilled()
        vllm.read_params(prefill.kv_transfer_params, _LentParams)
        return Prefilled(params=prefill.kv_transfer_params)

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """The client's own body with the prefill's params verbatim."""
        return make_leg(sub, endpoints.decode_rank, vllm.decode_body(sub, prefilled.params))

    def drop_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """A request that the prefill server rejects (404), with params that have it end the lease."""
        params: dict[str, Any] = {"do_remote_prefill": True, "drop": True, "transfer_id": sub.transfer_id}
        body = {"model": _NO_SUCH_MODEL, "prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
        leg = make_leg(sub, endpoints.prefill_rank, msgspec.json.encode(body))
        return msgspec.structs.replace(leg, path="/v1/completions")
