# SPDX-License-Identifier: Apache-2.0
"""The connector's figures on vLLM's own `/metrics` page and in its log. Imports vllm, as `connector` does."""

from __future__ import annotations

from typing import Any, get_args

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.transfer.events import PULL_FAILURE_REASONS, LeaseEndCause

_PLAIN = {
    "transfers": "Prompts whose KV was fetched and proven right.",
    "transfer_bytes": "Bytes of KV fetched.",
    "transfer_seconds": "Seconds spent on fetching, the proof included.",
    "recomputed": "Prompts computed here because their KV could not be fetched or proven.",
    "whole_prompts": "Prompts computed here because a model with windows or states cannot go on from all "
    "of a prompt, which is what was lent.",
    "prefix_pulls": "Prompts whose beginning was pulled from another server and proven right.",
    "prefix_pull_bytes": "Bytes of KV pulled so.",
    "not_lent": "Prompts that were asked for, but whose KV could not be lent.",
    "cached": "Prompts that were in the local prefix cache whole, so that nothing was fetched.",
    "aborted_before_admission": "Requests that were aborted or rejected before the engine had them.",
    "bad_params": "Requests with kv_transfer_params that could not be used.",
}
_BY_REASON = {
    "failed_transfers": "Transfers that failed, by reason.",
    "failed_prefix_pulls": "Beginnings of prompts that could not be pulled and were computed, by reason.",
    "leases_ended": "Leases on prompts of this server that ended, by cause.",
}
_REASONS = {
    "failed_transfers": PULL_FAILURE_REASONS,
    "failed_prefix_pulls": PULL_FAILURE_REASONS,
    "leases_ended": (*get_args(LeaseEndCause), "refused"),
}
"""Each is there from the start, so that its first count is seen as one."""


class TransferStats(KVConnectorStats):
    """What has been added since the last report: figures by name, `figure:reason` where there is one."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


class TransferMetrics(KVConnectorPromMetrics):
    """Counters `vllm:kvferry_…`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[prometheus_client.Counter]
        self._counters = {
            name: make(name=f"vllm:kvferry_{name}", documentation=text, labelnames=labelnames)
            for name, text in _PLAIN.items()
        }
        self._by_reason = {
            name: make(name=f"vllm:kvferry_{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in _BY_REASON.items()
        }
        for values in per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*values)
            for name, counter in self._by_reason.items():
                for reason in _REASONS[name]:
                    counter.labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, _, reason = key.partition(":")
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._by_reason:
                self._by_reason[name].labels(*labels, reason).inc(value)
