# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM's KV-cache specs (`v1/kv_cache_interface.py`, 0.32.0): the names and the fields that the
connector reads, and which positions of a request each kind keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int = 1
    head_size: int = 8
    dtype: str = "float32"

    def first_kept(self, num_tokens: int) -> int:
        """The position of the first block that is kept of so many tokens."""
        return 0


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 0

    def first_kept(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.sliding_window + 1) // self.block_size


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 0

    def first_kept(self, num_tokens: int) -> int:
        return num_tokens // self.attention_chunk_size * self.attention_chunk_size // self.block_size


@dataclass(frozen=True)
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...] = ((8,),)
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0

    def first_kept(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) - 1


@dataclass(frozen=True)
class CircularBufferSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True


@dataclass(frozen=True)
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]
