# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang run on several CPU ranks, and its own backends for P/D, by its entry point for plug-ins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


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
