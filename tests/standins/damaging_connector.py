# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a producer that denies every proof: `KvferryConnector`, in a real vLLM server, whose pulls
come out invalid. What was pulled is overwritten before vLLM learns of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvferry.agent.vllm.connector import KvferryConnector, StepMetadata
from kvferry.agent.vllm.plane_thread import Event
from kvferry.transfer.events import PullDone, PullFailed

DAMAGE = 7.0


class DamagingConnector(KvferryConnector):
    """See `KvferryConnector`."""

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, base.KVConnectorHandshakeMetadata]) -> None:
        super().set_xfer_handshake_metadata(metadata)
        if self._plane is not None:
            take = self._plane.take_events
            setattr(self._plane, "take_events", lambda: [denied(event) for event in take()])  # noqa: B010

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            blocks = sorted(connector_metadata.verdicts.failed_blocks)
            for cache in self._caches.values():
                cache[blocks] = DAMAGE


def denied(event: Event) -> Event:
    """The same event, but for a proof."""
    if not isinstance(event, PullDone):
        return event
    return PullFailed(transfer_id=event.transfer_id, reason="invalid", quiescent=True)
