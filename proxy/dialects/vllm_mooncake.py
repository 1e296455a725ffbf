# SPDX-License-Identifier: Apache-2.0
"""vLLM with MooncakeConnector: both legs at once; the prefill server writes into the decode server's blocks.

Source: vLLM 0.33.0, `mooncake_connector_proxy.py` (docs/sources.md#vllm-mooncake). A prefill server's
`control` is its bootstrap server's URL, whose `/query` names the engine id of each data-parallel rank. A
restarted engine has another id, so what was looked up is kept for a short while only
(`KvEndpointCache`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from kvferry.common.exceptions import NOT_JSON
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
from kvferry.proxy.wire.dialects import VLLM_MOONCAKE


class _MooncakeRank(msgspec.Struct, frozen=True):
    engine_id: str


@dataclass(frozen=True, kw_only=True)
class VllmMooncake(vllm.VllmDialect):
    """Nothing of a prefill's response goes to the decode leg; the two share only the transfer id."""

    name: ClassVar[str] = VLLM_MOONCAKE
    uses_kv_endpoints: ClassVar[bool] = True

    def leg_order(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> LegOrder:
        """The prefill server waits for the decode server's blocks."""
        return LegOrder.CONCURRENT

    def lookup(self, endpoints: Endpoints) -> str | None:
        """The bootstrap server's list of ranks."""
        return f"{endpoints.prefill.control.rstrip('/')}/query"

    def read_lookup(self, endpoints: Endpoints, raw: bytes) -> KvEndpoint:
        """The engine id of the rank that was picked."""
        try:
            ranks = msgspec.json.decode(raw, type=dict[str, _MooncakeRank])
        except NOT_JSON as error:
            raise BadResponse.of_json(error, f"the list of ranks of {endpoints.prefill.control}") from error
        rank = ranks.get(str(endpoints.prefill_rank or 0))
        if rank is None:
            raise BadResponse(
                f"{endpoints.prefill.control} does not know rank {endpoints.prefill_rank or 0} yet"
            )
        return KvEndpoint(engine_id=rank.engine_id)

    def prefill_leg(self, sub: SubRequest, endpoints: Endpoints) -> LegRequest:
        """The transfer id names what to keep."""
        body = vllm.prefill_body(sub, vllm.HAND_OVER | {"transfer_id": _transfer_id(sub)})
        return make_leg(sub, endpoints.prefill_rank, body)

    def read_prefill(self, sub: SubRequest, raw: bytes) -> Prefilled:
        """It hands over only when it ended by its length, and says nothing about where."""
        prefill = vllm.read_prefill(raw)
        vllm.require_length(prefill)
        return Prefilled(prompt_tokens_details=prefill.prompt_tokens_details)

    def decode_leg(
        self, sub: SubRequest, endpoints: Endpoints, prefilled: Prefilled, kv_endpoint: KvEndpoint | None
    ) -> LegRequest:
        """Where the prefill server is, and the same transfer id."""
        assert kv_endpoint is not None, "looked up before any leg"
        params = vllm.FETCH | {
            "remote_bootstrap_addr": endpoints.prefill.control.rstrip("/"),
            "remote_engine_id": kv_endpoint.engine_id,
            "transfer_id": _transfer_id(sub),
        }
        return make_leg(sub, endpoints.decode_rank, vllm.decode_body(sub, params))


def _transfer_id(sub: SubRequest) -> str:
    return f"xfer-{sub.transfer_id}"
