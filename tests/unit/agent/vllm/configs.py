# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM's `VllmConfig`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def vllm_config(**changes: Any) -> Any:
    """A `VllmConfig` that is served, but for the changes."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "data_parallel_index": 0,
            "data_parallel_rank_local": None,
            "local_engines_only": False,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "nnodes": 1,
            "node_rank_within_dp": 0,
            "distributed_executor_backend": "mp",
        },
        "model_config": {"model": "m", "enable_sleep_mode": False, "use_mla": False, "is_hybrid": False},
        "cache_config": {"cache_dtype": "auto", "calculate_kv_scales": False},
        "kv_transfer_config": {"engine_id": "b1c2_dp0_a"},
    }
    config = SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()})
    config.speculative_config = changes.pop("speculative_config", None)
    for name, value in changes.items():
        (part,) = [part for part, fields in parts.items() if name in fields]
        setattr(getattr(config, part), name, value)
    return config
