# SPDX-License-Identifier: Apache-2.0
"""The names of the dialects, as in `Register.dialect`: all that pairing has to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from kvferry.proxy.wire.registration import NATIVE_DIALECT

ATOM = "atom"
SGLANG = "sglang"
VLLM_KVFERRY = "vllm-kvferry"
VLLM_MOONCAKE = "vllm-mooncake"
VLLM_MORIIO = "vllm-moriio"
VLLM_NIXL = "vllm-nixl"

_ALONE = frozenset({NATIVE_DIALECT, ATOM, VLLM_KVFERRY, VLLM_MOONCAKE, VLLM_MORIIO, VLLM_NIXL})
SERVING_ALONE: Mapping[Literal["prefill", "decode"], frozenset[str]] = MappingProxyType(
    # An ATOM prefill server keeps all KV that it computes until a decode server has fetched it.
    {"prefill": _ALONE - {ATOM}, "decode": _ALONE}
)
"""By role: the dialects whose servers also take a request without a partner."""
SUPPORTED = _ALONE | {SGLANG}
