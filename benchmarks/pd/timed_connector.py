# SPDX-License-Identifier: Apache-2.0
"""`KvferryConnector` that notes, in the scheduler's process, when each hook saw a transfer.

One JSON line a transfer, in the file that `fleet.TIMELINE_VARIABLE` names: seconds by the monotonic clock,
which all processes of a host share. Names are those of `timeline.STAGES`.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from benchmarks.pd.fleet import TIMELINE_VARIABLE
from kvferry.agent.plugin.plane_thread import Event
from kvferry.agent.vllm.connector import KvferryConnector, KvferryConnectorMetadata
from kvferry.transfer.events import PullDone


class TimedConnector(KvferryConnector):
    """See `KvferryConnector`."""

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._path = Path(os.environ[TIMELINE_VARIABLE])
        self._marks: dict[str, dict[str, float]] = {}
        """By transfer id."""
        self._transfer_of: dict[str, str] = {}
        """By request, from its coming until it is computed on."""
        self._steps = self._reports = 0
        """Steps that were scheduled, and those of them whose results have come."""
        self._computing: deque[tuple[int, str]] = deque()
        """Transfers whose requests are in a step: which one."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], base.KVConnectorHandshakeMetadata]
    ) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        if self._plane is not None:
            take = self._plane.take_events

            def noting() -> list[Event]:
                events = take()
                for event in events:
                    self._note(event)
                return events

            setattr(self._plane, "take_events", noting)  # noqa: B010 (an instance's method)

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and not params.get("drop"):
            self._transfer_of[request.request_id] = params["transfer_id"]
            self._marks[params["transfer_id"]] = {"arrived": time.monotonic()}
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        transfer_id = self._transfer_of.get(request.request_id)
        if transfer_id is not None and num_external_tokens:
            self._marks[transfer_id]["allocated"] = time.monotonic()
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            if request_id in self._transfer_of:
                self._marks[self._transfer_of[request_id]]["told"] = time.monotonic()

    def build_connector_meta(self, scheduler_output: Any) -> KvferryConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        self._steps += 1
        for request_id in scheduler_output.num_scheduled_tokens:
            transfer_id = self._transfer_of.pop(request_id, None)
            if transfer_id is not None:
                self._marks[transfer_id]["scheduled"] = time.monotonic()
                self._computing.append((self._steps, transfer_id))
        return meta

    def get_kv_connector_stats(self) -> Any:
        """In the scheduler's process vLLM asks once for each step, when its results have come."""
        self._reports += 1
        while self._computing and self._computing[0][0] <= self._reports:
            _, transfer_id = self._computing.popleft()
            marks = self._marks.pop(transfer_id) | {"computed": time.monotonic()}
            with self._path.open("a") as file:
                file.write(json.dumps({"transfer_id": transfer_id, **marks}) + "\n")
        return super().get_kv_connector_stats()

    def _note(self, event: Event) -> None:
        marks = self._marks.get(event.transfer_id) if isinstance(event, PullDone) else None
        if marks is not None and isinstance(event, PullDone) and event.rank_reads:
            marks["read_began"] = min(read.began_at for read in event.rank_reads)
            marks["read_ended"] = max(read.ended_at for read in event.rank_reads)
            marks["proven"] = event.began_at + event.pull_s
