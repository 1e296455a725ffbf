# SPDX-License-Identifier: Apache-2.0
"""The connector in each of vLLM's rank processes: its KV tensors, and the transfer thread over them.

The scheduler's process commands the rank's transfer thread over a private Unix socket; vLLM's steps take no
part in a transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from kvferry.agent.ids import host_id
from kvferry.agent.plugin.settings import NotServed, PluginBackend, PluginSettings
from kvferry.agent.process.run_dir import private_run_dir
from kvferry.agent.vllm.kv_groups import RankShape, layer_caches
from kvferry.transfer.checksum import PoolSums
from kvferry.transfer.memory import device_name, pool_of_layers
from kvferry.transfer.plane import RankAddress
from kvferry.transfer.ranks.worker import WorkerConnector

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the scheduler's process learns of a rank.

    Attributes:
        address: Where it listens for the scheduler's process.
        host: Identity of its host.
        device: "cpu", or the GPU's name.
        layers: What each of its layers holds (`kv_groups.LayerCache`), after the group and the name.
    """

    rank: int
    address: RankAddress
    host: str
    num_blocks: int
    device: str
    layers: tuple[str, ...]


class KvferryConnectorWorker:
    """One rank.

    Args:
        caches: Its tensors by layer, as vLLM registers them.
        groups: vLLM's `KVCacheGroupSpec`s, of this rank's layers.
        is_remote: Whether the scheduler's process may be on another host.

    Raises `NotServed` if its KV lies in a way that cannot be transferred.
    """

    def __init__(
        self,
        settings: PluginSettings,
        caches: Mapping[str, torch.Tensor],
        groups: Sequence[Any],
        shape: RankShape,
        *,
        is_remote: bool = False,
    ) -> None:
        layers = [layer_caches(group, caches, shape) for group in groups]
        try:
            pool = pool_of_layers([[each.view for each in group] for group in layers], shape.num_blocks)
            if settings.verify_kv:
                PoolSums(pool)  # it raises now what would end the rank later
        except ValueError as error:
            raise NotServed(f"the KV cache's layout is not served: {error}") from error
        self._resources = ExitStack()
        run_dir = self._resources.enter_context(private_run_dir())
        self._connector = WorkerConnector(
            address=None if is_remote else run_dir / "transfer",
            rank=shape.rank,
            pool=pool,
            transfer=settings.transfer,
            auto=get_args(PluginBackend),
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
        self.facts = RankFacts(
            rank=shape.rank,
            address=self._connector.address,
            host=host_id(),
            num_blocks=shape.num_blocks,
            device=device_name(next(iter(caches.values())).device),
            layers=tuple(
                f"{number} {each.view.name.hex()} {each.content}"
                for number, group in enumerate(layers)
                for each in group
            ),
        )

    def close(self) -> None:
        """End the transfer thread: nothing writes into the KV afterwards. Idempotent."""
        self._resources.close()


def _always() -> threading.Event:
    """vLLM launches steps ahead, so no hook says when the GPU rests: a pull always takes little of it."""
    event = threading.Event()
    event.set()
    return event
