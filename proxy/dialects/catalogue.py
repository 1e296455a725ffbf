# SPDX-License-Identifier: Apache-2.0
"""All dialects, by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.proxy.dialects.atom import Atom
from kvferry.proxy.dialects.base import Dialect
from kvferry.proxy.dialects.native import Native
from kvferry.proxy.dialects.sglang import Sglang
from kvferry.proxy.dialects.vllm_kvferry import VllmKvferry
from kvferry.proxy.dialects.vllm_mooncake import VllmMooncake
from kvferry.proxy.dialects.vllm_moriio import VllmMoriio
from kvferry.proxy.dialects.vllm_nixl import VllmNixl


def all_dialects(
    *,
    nixl_lease_s: float | None = None,
    moriio_lease_s: float | None = None,
    keep_turns_s: float = 0.0,
    allow_fields: frozenset[str] = frozenset(),
) -> Mapping[str, Dialect]:
    """Return the dialects, by name.

    The leases are how long prefill servers keep KV, as the operator says; None if unknown. `keep_turns_s`:
    for how long decode servers that can are to keep what they have decoded. `allow_fields`: what clients may
    send beside each dialect's own.
    """
    made = (
        Native(),
        Atom(allow_fields=allow_fields),
        Sglang(allow_fields=allow_fields),
        VllmKvferry(allow_fields=allow_fields, keep_turns_s=keep_turns_s),
        VllmMooncake(allow_fields=allow_fields),
        VllmMoriio(allow_fields=allow_fields, lease_s=moriio_lease_s),
        VllmNixl(allow_fields=allow_fields, lease_s=nixl_lease_s),
    )
    return {dialect.name: dialect for dialect in made}
