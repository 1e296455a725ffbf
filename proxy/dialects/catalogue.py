# SPDX-License-Identifier: Apache-2.0
"""All dialects, by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.proxy.dialects.atom import Atom
from kvferry.proxy.dialects.base import Dialect
from kvferry.proxy.dialects.sglang import Sglang
from kvferry.proxy.dialects.vllm_mooncake import VllmMooncake
from kvferry.proxy.dialects.vllm_moriio import VllmMoriio
from kvferry.proxy.dialects.vllm_nixl import VllmNixl
from kvferry.proxy.wire.messages import NATIVE_DIALECT

_OTHERS: tuple[type[Dialect], ...] = (Atom, Sglang, VllmMooncake, VllmMoriio, VllmNixl)
SUPPORTED = frozenset({NATIVE_DIALECT} | {dialect.name for dialect in _OTHERS})
SERVING_ALONE = frozenset({NATIVE_DIALECT} | {dialect.name for dialect in _OTHERS if dialect.serves_alone})


def other_dialects(*, nixl_lease_s: float, moriio_lease_s: float) -> Mapping[str, Dialect]:
    """Return the dialects of other engines, by name. The leases are how long prefill servers keep KV."""
    made = (
        Atom(),
        Sglang(),
        VllmMooncake(),
        VllmMoriio(lease_s=moriio_lease_s),
        VllmNixl(lease_s=nixl_lease_s),
    )
    return {dialect.name: dialect for dialect in made}
