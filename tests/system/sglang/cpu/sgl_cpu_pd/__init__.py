# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang run on several CPU ranks, and its own backends for P/D, by its entry point for plug-ins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch


def register() -> None:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    utils = "sglang.srt.disaggregation.utils"
    HookRegistry.register(f"{utils}.get_kv_class", _without_pinned_memory, HookType.AROUND)
    communicator = "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator"
    HookRegistry.register(f"{communicator}.__init__", _without_nccl, HookType.AROUND)
    _register_host_memory()
    if os.environ.get("KVFERRY_TEST_MLA"):
        _absorb_always()
    if os.environ.get("KVFERRY_TEST_SEEDS"):
        _draw_by_seeds()
    _read_late(float(os.environ.get("KVFERRY_TEST_LATE_READ_S", "0")))


def _without_pinned_memory(original: Callable[..., Any], backend: Any, class_type: Any) -> Any:
    found = original(backend, class_type)
    if getattr(found, "supports_host_tensor_indices", False):
        found.supports_host_tensor_indices = False
    return found


def _without_nccl(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    self.available, self.disabled, self.world_size = False, True, 1


def _absorb_always() -> None:
    """Have models with MLA attend to latents in prompts too: attention on CPUs reads what is cached."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)


def _draw_by_seeds() -> None:
    """Have the deterministic mode, the only one with seeds, run on CPUs. Batches are summed as ever."""
    from sglang.srt import server_args
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batches = "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode"
    HookRegistry.register(batches, _as_ever, HookType.REPLACE)
    hashes = "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32"
    HookRegistry.register(hashes, _murmur_hash32, HookType.REPLACE)


def _as_ever() -> None:
    pass


def _murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """As SGLang's kernel for GPUs: of each row's seed and position with each column."""
    low = 0xFFFFFFFF
    seeds, positions = seeds.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    found = torch.zeros(1, 1, dtype=torch.int64)
    for part in (seeds & low, (seeds >> 32) & low, positions, columns.to(torch.int64)[None]):
        part = part * 0xCC9E2D51 & low
        part = (part << 15 | part >> 17) * 0x1B873593 & low
        found = found ^ part
        found = (found << 13 | found >> 19) * 5 + 0xE6546B64 & low
    found = found ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ found >> shift) * factor & low
    return found ^ found >> 16


def _register_host_memory() -> None:
    """Have NIXL take pools for what they are."""
    try:
        from nixl._api import nixl_agent
    except ImportError:
        return
    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, _as_host_memory(getattr(nixl_agent, name)))


def _as_host_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *map(_host, args), **{name: _host(value) for name, value in kwargs.items()})

    return call


def _host(value: Any) -> Any:
    return "DRAM" if isinstance(value, str) and value == "VRAM" else value


def _read_late(delay_s: float) -> None:
    """Have our plane's reads begin late."""
    if not delay_s:
        return
    from kvferry.transfer.ranks.messages import Read
    from kvferry.transfer.ranks.reads import RankReader

    handle = RankReader.handle

    def handle_late(self: RankReader, command: Any) -> None:
        if isinstance(command, Read):
            time.sleep(delay_s)
        handle(self, command)

    RankReader.handle = handle_late  # type: ignore[method-assign]
