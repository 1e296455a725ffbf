# SPDX-License-Identifier: Apache-2.0
"""Stands in for servers whose memory or network is bad: vLLM's NixlConnector, in a real decode server, with
one bit flipped in the KV of each prompt that it has received.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from tests.standins.faults.tcp import FLIPPED_BIT


class FlippingNixlConnector(NixlConnector):
    """See `NixlConnector`."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())
        self._random = random.Random(0)
        self._blocks: dict[str, list[int]] = {}
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **words: Any) -> None:
        for request, meta in self._connector_metadata.reqs_to_recv.items():
            self._blocks[request] = list(meta.local_block_ids[0])
        super().start_load_kv(forward_context, **words)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving:
            if blocks := self._blocks.pop(request, None):
                self._flip(self._random.choice(blocks))
        return results

    def _flip(self, block: int) -> None:
        """The bit that `faults.tcp` flips, of a random element. Blocks come first in every layer's view."""
        elements = self._random.choice(self._caches)[block].view(torch.int32)
        elements[tuple(map(self._random.randrange, elements.shape))] ^= FLIPPED_BIT << 24
