# SPDX-License-Identifier: Apache-2.0
"""The connector in each of vLLM's rank processes: its KV tensors, and the transfer thread over them.

The scheduler's process commands the rank's transfer thread over a private Unix socket; vLLM's steps take no
part in a transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.agent.process.run_dir import private_run_dir
from kvferry.agent.vllm.settings import ConnectorSettings, NotServed
from kvferry.common.hashing import Purpose, digest
from kvferry.transfer.memory import KVPool, pool_of_layers
from kvferry.transfer.ranks.worker import WorkerConnector

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the scheduler's process learns of a rank.

    Attributes:
        layer_names: A hash.
        head_dim: Of K, and of V.
        order: How a run of KV is ordered: `token,kv,dim`, or `kv,token,dim`.
    """

    rank: int
    address: str
    num_layers: int
    layer_names: str
    num_blocks: int
    head_dim: int
    order: str
    dtype: str


class KvferryConnectorWorker:
    """One rank. Raises `NotServed` if its KV lies in a way that cannot be transferred."""

    def __init__(
        self,
        settings: ConnectorSettings,
        caches: Mapping[str, torch.Tensor],
        *,
        rank: int,
        heads: range,
        num_blocks: int,
        block_size: int,
    ) -> None:
        pool, head_dim = _pool(caches, heads, num_blocks, block_size)
        self._resources = ExitStack()
        address = self._resources.enter_context(private_run_dir()) / "transfer"
        self.facts = RankFacts(
            rank=rank,
            address=str(address),
            num_layers=len(pool.placement.layers),
            layer_names=digest(Purpose.VLLM_LAYERS, *caches, size=8).hex(),
            num_blocks=num_blocks,
            head_dim=head_dim,
            order="token,kv,dim" if pool.placement.planes == 1 else "kv,token,dim",
            dtype=str(next(iter(caches.values())).dtype).removeprefix("torch."),
        )
        self._connector = WorkerConnector(
            address=address,
            rank=rank,
            pool=pool,
            transfer=settings.transfer,
            bind_host=settings.bound_host,
            advertise_host=settings.advertised_host,
            transfer_options=settings.transfer_options,
            computing=_always(),
        )
        try:
            self._connector.start()
        except BaseException:
            self._resources.close()
            raise
        self._resources.callback(self._connector.close)

    def close(self) -> None:
        """End the transfer thread: nothing writes into the KV afterwards. Idempotent."""
        self._resources.close()


def _always() -> threading.Event:
    """vLLM launches steps ahead, so no hook says when the GPU rests: a pull always takes little of it."""
    event = threading.Event()
    event.set()
    return event


def _pool(
    caches: Mapping[str, torch.Tensor], heads: range, num_blocks: int, block_size: int
) -> tuple[KVPool, int]:
    """The caches as vLLM registers them, layer by layer, and the size of one head's K.

    They are `[block, head, token, K then V]` from 0.29 on and on CPUs. Before, GPUs have
    `[block, K|V, token, head, dim]`, in memory `[block, K|V, head, token, dim]` if the layout is
    HND, in an allocation for each layer (docs/sources.md#vllm).
    """
    layers = []
    for name, cache in caches.items():
        layer = cache.permute(0, 1, 3, 2, 4) if cache.dim() == 5 else cache
        if layer.dim() not in (4, 5) or layer.shape[0] != num_blocks or layer.shape[-2] != block_size:
            raise NotServed(
                f"the KV cache of {name} has shape {tuple(cache.shape)}: neither one block per KV block "
                f"({num_blocks} of {block_size} tokens) nor [block, head, token, K and V]"
            )
        if layer.shape[-3] != len(heads):
            raise NotServed(f"the KV cache of {name} has {layer.shape[-3]} heads, {len(heads)} expected")
        layers.append(layer)
    planes = 2 if layers[0].dim() == 5 else 1
    try:
        pool = pool_of_layers(layers, planes=planes, heads=heads)
    except ValueError as error:
        raise NotServed(
            f"the KV cache's layout is not served: {error}; set VLLM_KV_CACHE_LAYOUT to one that keeps a "
            "block's heads apart (HND before vLLM 0.29, then LBHNC, LHBNC, BLHNC or BHLNC)"
        ) from error
    return pool, layers[0].shape[-1] * planes // 2
