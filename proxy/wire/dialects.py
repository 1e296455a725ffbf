# SPDX-License-Identifier: Apache-2.0
"""The dialects of agents and of other engines' servers, as in `Register.dialect`: all that is to be known of
one without speaking it. `proxy.dialects.catalogue` has those that speak them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

NATIVE_DIALECT = "native"
"""The dialect of our own agents."""
ATOM = "atom"
SGLANG = "sglang"
VLLM_KVFERRY = "vllm-kvferry"
VLLM_MOONCAKE = "vllm-mooncake"
VLLM_MORIIO = "vllm-moriio"
VLLM_NIXL = "vllm-nixl"

MAX_KEEP_S = 3600.0
"""Most seconds for which a decode server keeps a turn's KV (`keep_s` of its `kv_transfer_params`)."""

KV_UNREAD = "the decode server did not read the KV"
"""How SGLang's prefill servers begin the message of a 503 for a lease that expired or was dropped."""


class DialectFacts(NamedTuple):
    """`alone`: the roles in which a server also takes a request without a partner. `ping_interval_s`: how
    often its servers ping.
    """

    alone: frozenset[Literal["prefill", "decode"]]
    ping_interval_s: float = 1.0


_BOTH = frozenset[Literal["prefill", "decode"]]({"prefill", "decode"})
DIALECTS: Mapping[str, DialectFacts] = MappingProxyType(
    {
        NATIVE_DIALECT: DialectFacts(_BOTH),
        # An ATOM prefill server keeps all KV that it computes until a decode server has fetched it.
        ATOM: DialectFacts(_BOTH - {"prefill"}, ping_interval_s=5.0),
        SGLANG: DialectFacts(frozenset()),
        VLLM_KVFERRY: DialectFacts(_BOTH),
        VLLM_MOONCAKE: DialectFacts(_BOTH),
        VLLM_MORIIO: DialectFacts(_BOTH, ping_interval_s=3.0),
        VLLM_NIXL: DialectFacts(_BOTH),
    }
)
FOREIGN_DIALECTS = tuple(name for name in DIALECTS if name != NATIVE_DIALECT)


def serves_alone(dialect: str, leg: Literal["prefill", "decode"]) -> bool:
    """Return whether servers of the leg's role also take a request without a partner."""
    facts = DIALECTS.get(dialect)
    return facts is not None and leg in facts.alone
