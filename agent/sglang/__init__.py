# SPDX-License-Identifier: Apache-2.0
"""kvferry in SGLang: our transfer plane as one of its transfer backends."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

BACKEND = "kvferry"
_UTILS = "sglang.srt.disaggregation.utils"
_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


def register() -> None:
    """Make `--disaggregation-transfer-backend kvferry` known to SGLang.

    It is the entry point `sglang.srt.plugins`: each of SGLang's processes calls it once, before it reads its
    arguments.
    """
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_disagg_transfer_backend_choices

    members = {each.name: each.value for each in utils.TransferBackend} | {BACKEND.upper(): BACKEND}
    backends = Enum("TransferBackend", members, module=utils.__name__)  # type: ignore[misc]
    HookRegistry.register(f"{_UTILS}.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _kv_class, HookType.AROUND)
    for queue in (_PREFILL, _DECODE):
        HookRegistry.register(f"{queue}._init_kv_manager", _open_manager, HookType.AFTER)
    HookRegistry.register(f"{_PREFILL}.create_sender", _bind_sender, HookType.AFTER)
    HookRegistry.register(f"{_DECODE}._create_receiver_and_enqueue", _bind_receiver, HookType.AFTER)
    add_disagg_transfer_backend_choices([BACKEND])


def _kv_class(original: Callable[..., Any], backend: Any, class_type: Any) -> Any:
    """SGLang's container of arguments serves all backends, and its health checks use the backend `fake`.

    Raises `NotServed` for another version of SGLang, which may lack what our classes are made of.
    """
    if backend.value != BACKEND or class_type.value == "kvargs":
        return original(backend, class_type)
    import sglang

    from kvferry.agent.sglang.settings import check_version

    check_version(sglang.__version__)
    from kvferry.agent.sglang import conn

    return conn.CLASSES[class_type.value]


def _open_manager(manager: Any, queue: Any) -> None:
    if hasattr(manager, "open_plane"):
        manager.open_plane(queue.scheduler)


def _bind_sender(is_created: bool, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if is_created and hasattr(request.disagg_kv_sender, "bind_request"):
        request.disagg_kv_sender.bind_request(request)


def _bind_receiver(created: Any, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if hasattr(created.kv_receiver, "bind_request"):
        created.kv_receiver.bind_request(request)
