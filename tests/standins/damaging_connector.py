# SPDX-License-Identifier: Apache-2.0
"""Stands in for servers whose KV goes wrong: `KvferryConnector`, in a real vLLM server, that lends prompts
with a hole, or whose pulls come out invalid after what was pulled has been overwritten.

`damage` says which of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvferry.agent.plugin.plane_thread import Event
from kvferry.agent.vllm.connector import KvferryConnector, KvferryConnectorMetadata
from kvferry.transfer.events import PullDone, PullFailed
from kvferry.transfer.plane import BlockRun, all_blocks
from tests.standins.damage import Damage, damage

_BYTE = 7
_ALL_LAYERS = 1 << 16
_OVERWRITING = (Damage.DENY, Damage.OVERWRITE, Damage.DRAFT)


@dataclass(frozen=True)
class DamagingMetadata(KvferryConnectorMetadata):
    """With the blocks that the ranks overwrite before the step, and in how many of the last layers."""

    overwritten: tuple[int, ...]
    num_layers: int


class DamagingConnector(KvferryConnector):
    """See `KvferryConnector`."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], base.KVConnectorHandshakeMetadata]
    ) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        plane: Any = self._plane
        self._take, self._pull = plane.take_events, plane.pull
        plane.take_events, plane.pull = self._take_damaged, self._noted_pull
        self._runs: dict[str, Sequence[BlockRun]] = {}
        self._overwriting: list[tuple[Event, tuple[int, ...]]] = []
        self._overwritten: list[Event] = []

    def _noted_pull(
        self, transfer_id: str, remote: Any, runs: Sequence[BlockRun], timeout_s: float, ids_hash: str
    ) -> None:
        self._runs[transfer_id] = runs
        self._pull(transfer_id, remote, runs, timeout_s, ids_hash)

    def _take_damaged(self) -> list[Event]:
        """The plane's events; those of prompts that are overwritten come after the step that does it."""
        events, self._overwritten = self._overwritten, []
        for event in self._take():
            how, group = damage()
            if isinstance(event, PullDone) and how in _OVERWRITING:
                runs = self._runs[event.transfer_id]
                blocks = all_blocks(runs if group is None else [runs[group]])
                self._overwriting.append((denied(event) if how is Damage.DENY else event, blocks))
            elif isinstance(event, PullFailed) and event.reason == "invalid" and how is Damage.BELIEVE:
                events.append(believed(event))
            else:
                events.append(event)
        return events

    def build_connector_meta(self, scheduler_output: Any) -> DamagingMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        overwriting, self._overwriting = self._overwriting, []
        self._overwritten += [event for event, _ in overwriting]
        blocks = tuple(block for _, each in overwriting for block in each)
        num_layers = 1 if damage()[0] is Damage.DRAFT else _ALL_LAYERS
        return DamagingMetadata(metadata.step, blocks, num_layers)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, DamagingMetadata) and connector_metadata.overwritten:
            # A block is of one group, and all groups' layers lie in one pool.
            for cache in list(self._caches.values())[-connector_metadata.num_layers :]:
                blocks = cache.unflatten(0, (self._kv_caches.num_blocks, -1))
                blocks[list(connector_metadata.overwritten)] = _BYTE

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        how, holed = damage()
        if how is Damage.HOLE:
            block_ids = tuple(
                with_a_hole(ids) if group == holed else ids for group, ids in enumerate(block_ids)
            )
        return super().request_finished_all_groups(request, block_ids)


def denied(event: PullDone) -> PullFailed:
    """The same pull, but for its proof."""
    return PullFailed(transfer_id=event.transfer_id, reason="invalid", quiescent=True)


def believed(event: PullFailed) -> PullDone:
    """The same pull, as if it had been proven right."""
    return PullDone(
        transfer_id=event.transfer_id, backend=event.backend, nbytes=0, descriptors=0, wait_s=0.0, pull_s=0.0
    )


def with_a_hole(ids: list[int]) -> list[int]:
    """A group's blocks without the first that holds anything."""
    first = next((position for position, block in enumerate(ids) if block), len(ids))
    return [0 if position == first else block for position, block in enumerate(ids)]
