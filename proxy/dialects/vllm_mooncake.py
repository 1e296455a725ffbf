# SPDX-License-Identifier: Apache-2.0
"""vLLM with MooncakeConnector: both legs at once; the prefill server writes into the decode server's blocks.

Source: vLLM 0.33.0, `mooncake_connector_proxy.py` (`vllm-sglang.md` §1.5, §2.4). A prefill server's `control`
is its bootstrap server's URL, whose `/query` names the engine id of each data-parallel rank. A restarted
engine has another id, so what was looked up is kept for a short while only (`proxy.dialects.peer_cache`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from kvferry.proxy.dialects import vllm
from kvferry.proxy.dialects.base import Endpoints, Leg, Peer, Prefilled, Shape, SubRequest, make_leg
from kvferry.proxy.errors import NOT_JSON, BadResponse

NAME = "vllm-mooncake"


class _Rank(msgspec.Struct, frozen=True):
    engine_id: str


@dataclass(frozen=True, kw_only=True)
class VllmMooncake(vllm.VllmDialect):
    """Nothing of a prefill's answer goes to the decode leg; the two have only the transfer id in common."""

    name: ClassVar[str] = NAME

    def shape(self, ends: Endpoints, peer: Peer | None) -> Shape:
        """The prefill server waits for the decode server's blocks."""
        return Shape.CONCURRENT

    def lookup(self, ends: Endpoints) -> str | None:
        """The bootstrap server's list of ranks."""
        return f"{ends.prefill.control.rstrip('/')}/query"

    def read_lookup(self, ends: Endpoints, raw: bytes) -> Peer:
        """The engine id of the rank that was drawn."""
        try:
            ranks = msgspec.json.decode(raw, type=dict[str, _Rank])
        except NOT_JSON as error:
            raise BadResponse(f"{ends.prefill.control} answered no list of ranks: {error}") from error
        rank = ranks.get(str(ends.prefill_rank or 0))
        if rank is None:
            raise BadResponse(f"{ends.prefill.control} does not know rank {ends.prefill_rank or 0} yet")
        return Peer(engine_id=rank.engine_id)

    def prefill_leg(self, part: SubRequest, ends: Endpoints) -> Leg:
        """The transfer id names what to keep."""
        body = vllm.prefill_body(part, vllm.HAND_OVER | {"transfer_id": _transfer_id(part)})
        return make_leg(part, ends.prefill_rank, body)

    def read_prefill(self, part: SubRequest, raw: bytes) -> Prefilled:
        """It hands over only when it ended by its length, and says nothing about where."""
        answer = vllm.read_prefill(raw)
        vllm.require_length(answer)
        return Prefilled(prompt_tokens_details=answer.prompt_tokens_details)

    def decode_leg(self, part: SubRequest, ends: Endpoints, prefilled: Prefilled, peer: Peer | None) -> Leg:
        """Where the prefill server is, and the same transfer id."""
        assert peer is not None, "looked up before any leg"
        params = vllm.FETCH | {
            "remote_bootstrap_addr": ends.prefill.control.rstrip("/"),
            "remote_engine_id": peer.engine_id,
            "transfer_id": _transfer_id(part),
        }
        return make_leg(part, ends.decode_rank, vllm.decode_body(part, params))


def _transfer_id(part: SubRequest) -> str:
    return f"xfer-{part.transfer_id}"
