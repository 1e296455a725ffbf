# SPDX-License-Identifier: Apache-2.0
"""`KvferryConnector`: what vLLM loads. It has one instance in the scheduler's process and one in each rank's.

Every hook is handed to that instance's side; nothing is decided here. Methods that only some versions of vLLM
call are there for all, and nothing optional is inherited (docs/engines/vllm.md).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.utils.network_utils import get_ip

from kvferry.agent.plugin.plane_thread import PlaneThread
from kvferry.agent.vllm.connector_scheduler import ConnectorMetadata, KvferryConnectorScheduler
from kvferry.agent.vllm.connector_worker import KvferryConnectorWorker, RankFacts
from kvferry.agent.vllm.kv_groups import RankShape, groups_of
from kvferry.agent.vllm.settings import (
    check_served,
    is_remote,
    read_settings,
    release_of,
    role_of,
    with_own_host,
)
from kvferry.agent.vllm.startup import start_connector_scheduler
from kvferry.agent.vllm.stats import TransferMetrics, TransferStats

_FAILED_BY_REQUEST = hasattr(base.KVConnectorBase_V1, "get_transfer_results")
"""vLLM 0.30 and later; before, failures are reported by block."""


@dataclass(frozen=True)
class RankHandshake(base.KVConnectorHandshakeMetadata):
    """From a rank to the scheduler's process."""

    facts: RankFacts


@dataclass(frozen=True)
class KvferryConnectorMetadata(base.KVConnectorMetadata):
    """From the scheduler to the ranks, with each step."""

    step: ConnectorMetadata


_SEVERAL_GROUPS = (base.SupportsHMA,) if _FAILED_BY_REQUEST else ()
"""Before 0.30 no load into several groups of KV caches can fail; without this, vLLM has layers with windows
keep all of their tokens' KV, in one group."""


class KvferryConnector(base.KVConnectorBase_V1, *_SEVERAL_GROUPS):  # type: ignore[misc]
    """See `KVConnectorBase_V1`, which says when each method is called. Raises `NotServed`."""

    supports_divergent_local_hybrid_hits = True
    """vLLM may find more of a prompt in one group's prefix cache than in another's."""

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        self._config = vllm_config
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config or {})
        self._settings = with_own_host(settings, vllm_config.parallel_config, get_ip)
        self._serving_role = role_of(transfer.kv_role)
        check_served(vllm.__version__, vllm_config)
        self._kv_caches = kv_cache_config
        self._groups = groups_of(kv_cache_config)
        self._block_pool: Any = None
        self._plane: PlaneThread | None = None
        self._scheduler: KvferryConnectorScheduler | None = None
        self._worker: KvferryConnectorWorker | None = None
        self._step = ConnectorMetadata()

    # In a rank's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        shape = RankShape(
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=self._config.parallel_config.tensor_parallel_size,
            pp_rank=get_pp_group().rank_in_group,
            num_blocks=self._kv_caches.num_blocks,
            model_heads=self._config.model_config.get_total_num_kv_heads(),
            cache_dtype=self._config.cache_config.cache_dtype,
        )
        groups = self._kv_caches.kv_cache_groups
        remote = is_remote(self._config.parallel_config)
        self._worker = KvferryConnectorWorker(self._settings, kv_caches, groups, shape, is_remote=remote)

    def get_handshake_metadata(self) -> RankHandshake | None:
        return None if self._worker is None else RankHandshake(self._worker.facts)

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, KvferryConnectorMetadata) and self._is_first_rank:
            self._step = connector_metadata.step

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: transfers take no part in steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        step = self._step
        return base.KVConnectorTransferResults(
            finished_sending=step.sent,
            finished_recving=step.received,
            failed_recving=step.failed,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._step.sent or None, self._step.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if _FAILED_BY_REQUEST else self._step.failed_blocks

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._step = ConnectorMetadata()

    @property
    def _is_first_rank(self) -> bool:
        return self._worker is not None and self._worker.facts.rank == 0

    # In the scheduler's process.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], base.KVConnectorHandshakeMetadata]
    ) -> None:
        """Start the plane: the ranks are known now, by stage and number. Waits until each has reported."""
        ranks = [metadata[rank] for rank in sorted(metadata)]
        parallel = self._config.parallel_config
        if len(ranks) != parallel.pipeline_parallel_size * parallel.tensor_parallel_size:
            raise RuntimeError(f"{len(ranks)} ranks have reported to the transfer plane, not all")
        self._plane, self._scheduler = start_connector_scheduler(
            self._settings,
            self._config,
            self._serving_role,
            [rank.facts for rank in ranks if isinstance(rank, RankHandshake)],
            self._groups,
            version=vllm.__version__,
            free_blocks=self._free_blocks,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._block_pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self._started.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._started.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        missing = [
            [0 if each.is_null or each.block_hash is not None else each.block_id for each in group]
            for group in blocks.blocks
        ]
        self._started.update_state_after_alloc(request, missing, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvferryConnectorMetadata:
        self._started.scheduled(scheduler_output.num_scheduled_tokens)
        return KvferryConnectorMetadata(
            self._started.build_metadata(len(scheduler_output.num_scheduled_tokens))
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Add to a step's report what has been proven since it was made."""
        connector_output.finished_recving = self._started.add_proven(connector_output.finished_recving)

    def take_events(self) -> tuple[()]:
        """No KV events of our own: but vLLM asks when it has taken the outputs of a step."""
        self._started.outputs_taken()
        return ()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._started.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._started.request_finished(request, block_ids)

    def get_finished_count(self) -> int:
        """One: what rank 0 reports holds for all ranks, for the plane has heard all of them (I6)."""
        return 1

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All: vLLM must not write zeros over blocks that are being fetched."""
        return tuple(range(len(self._groups)))

    def reset_cache(self) -> bool | None:
        self._started.reset()
        return True

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._scheduler is None:
            return None
        return TransferStats(data=self._scheduler.take_figures())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _started(self) -> KvferryConnectorScheduler:
        if self._scheduler is None:
            raise RuntimeError("the ranks have not reported to the transfer plane")
        return self._scheduler

    def _free_blocks(self) -> int:
        return int(self._block_pool.get_num_free_blocks()) if self._block_pool is not None else 0

    # In both.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """One that keeps a block in one piece, where kernels can take it; CPUs have only their own.

        Before 0.29 each layer has its own allocation, and a block's heads lie apart in it or do not. Since
        then layers with pages of different size need each page in one piece, within its block.
        """
        if vllm_config.device_config.device_type == "cpu":
            return None
        if release_of(vllm.__version__) < (0, 29):
            return "HND"
        has_other_pages = vllm_config.model_config.is_hybrid or vllm_config.speculative_config is not None
        return "BLHNC" if has_other_pages else "BHLNC"

    def shutdown(self) -> None:
        for part in (self._plane, self._worker):
            if part is not None:
                part.close()


def _log_with_vllm() -> None:
    """Have our log lines written as vLLM's are."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.setLevel(theirs.getEffectiveLevel())
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.propagate = False
