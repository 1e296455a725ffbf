# SPDX-License-Identifier: Apache-2.0
"""Stand in for prefill servers that write wrong KV and do not know: `KvferryConnector`, in a real vLLM
server, which spoils what each step has written.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from kvferry.agent.vllm.connector import KvferryConnector
from kvferry.agent.vllm.kv_groups import specs_of

_WITH_WINDOW = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")


class _WrongKvConnector(KvferryConnector):
    """Spoils KV where this server is a producer. See `KvferryConnector`."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._block_sizes: dict[str, int] = {}
        """By the names of the layers that are spoilt."""
        if self._config.kv_transfer_config.kv_role != "kv_producer":
            return
        for group in self._kv_caches.kv_cache_groups:
            for name, spec in specs_of(group).items():
                if self._is_spoilt(type(spec).__name__):
                    self._block_sizes[name] = spec.block_size
        assert self._block_sizes, "this model has no such layer"

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if (block_size := self._block_sizes.get(layer_name)) is not None:
            slots = attn_metadata.slot_mapping
            pages = kv_layer.movedim(kv_layer.shape.index(self._kv_caches.num_blocks), 0)
            self._spoil(pages, torch.unique_consecutive(slots[slots >= 0] // block_size))

    def _is_spoilt(self, kind: str) -> bool:
        """`kind`: the name of a layer's `KVCacheSpec`."""
        return True

    @abstractmethod
    def _spoil(self, pages: torch.Tensor, written: torch.Tensor) -> None:
        """`pages`: a layer's KV by block. `written`: the blocks of this step, in the order of the tokens."""


class DoubledFp8Connector(_WrongKvConnector):
    """Each element of FP8 KV is twice what it should be, as with a scale that two servers do not share."""

    def _spoil(self, pages: torch.Tensor, written: torch.Tensor) -> None:
        fp8 = pages.view(torch.float8_e4m3fn)
        fp8[written] = (fp8[written].float() * 2).to(torch.float8_e4m3fn)


class ShiftedWindowConnector(_WrongKvConnector):
    """In layers with a window, each block but the first of a step holds what the one before it should."""

    def _is_spoilt(self, kind: str) -> bool:
        return kind in _WITH_WINDOW

    def _spoil(self, pages: torch.Tensor, written: torch.Tensor) -> None:
        pages[written[1:]] = pages[written[:-1]]
