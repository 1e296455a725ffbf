# SPDX-License-Identifier: Apache-2.0
"""The connector's half in each of vLLM's rank processes: its KV tensors, and the transfer thread over them.

The scheduler's process commands the rank's transfer thread over a private Unix socket; vLLM's steps take no
part in a transfer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.agent.process.run_dir import private_run_dir
from kvferry.agent.vllm.settings import ConnectorSettings, NotServed
from kvferry.transfer.memory import KVPool, pool_of_layers
from kvferry.transfer.ranks.worker import WorkerConnector

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the scheduler's half learns of a rank. `head_dim` is that of K and of V; `layer_names` a hash."""

    rank: int
    address: str
    num_layers: int
    layer_names: str
    num_blocks: int
    head_dim: int
    dtype: str


class WorkerHalf:
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
        pool = _pool(caches, heads, num_blocks, block_size)
        first = next(iter(caches.values()))
        self._resources = ExitStack()
        address = self._resources.enter_context(private_run_dir()) / "transfer"
        self.facts = RankFacts(
            rank=rank,
            address=str(address),
            num_layers=len(pool.placement.layers),
            layer_names=hashlib.blake2b("\0".join(caches).encode(), digest_size=8).hexdigest(),
            num_blocks=num_blocks,
            head_dim=first.shape[3] // 2,
            dtype=str(first.dtype).removeprefix("torch."),
        )
        self._connector = WorkerConnector(
            address=address,
            rank=rank,
            pool=pool,
            transfer=settings.transfer,
            bind_host=settings.bound_host,
            advertise_host=settings.advertised_host,
            transfer_options=settings.transfer_options,
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


def local_heads(num_kv_heads: int, tp_size: int, rank: int) -> range:
    """The KV heads of a rank, by their number over all ranks: split evenly, or each held by several ranks.

    Raises `NotServed` if that does not come out even.
    """
    if num_kv_heads % tp_size == 0:
        share = num_kv_heads // tp_size
        return range(rank * share, (rank + 1) * share)
    if tp_size % num_kv_heads == 0:
        head = rank // (tp_size // num_kv_heads)
        return range(head, head + 1)
    raise NotServed(f"tensor_parallel_size {tp_size} does not divide {num_kv_heads} KV heads evenly")


def _pool(caches: Mapping[str, torch.Tensor], heads: range, num_blocks: int, block_size: int) -> KVPool:
    """The caches as vLLM 0.29 and later register them: per layer `[block, head, token, K then V]`."""
    for name, cache in caches.items():
        if cache.dim() != 4 or cache.shape[0] != num_blocks or cache.shape[2] != block_size:
            raise NotServed(
                f"the KV cache of {name} has shape {tuple(cache.shape)}: neither one block per KV block "
                f"({num_blocks} of {block_size} tokens) nor [block, head, token, K and V]"
            )
        if cache.shape[1] != len(heads):
            raise NotServed(f"the KV cache of {name} has {cache.shape[1]} heads, {len(heads)} expected")
    try:
        return pool_of_layers(list(caches.values()), planes=1, heads=heads)
    except ValueError as error:
        raise NotServed(
            f"the KV cache's layout is not served: {error}; set VLLM_KV_CACHE_LAYOUT to one that keeps a "
            "block's heads apart (LBHNC, LHBNC, BLHNC or BHLNC)"
        ) from error
