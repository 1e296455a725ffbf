# SPDX-License-Identifier: Apache-2.0
"""The registration of a server of another engine, from its own ping or from looking at it."""

from __future__ import annotations

from kvferry.proxy.discovery.static_nodes import TransferMode
from kvferry.proxy.wire.messages import Load, Register, Role

_UNKNOWN_LOAD = Load(running=0, waiting=0, kv_blocks_free=0, kv_blocks_total=0, kv_blocks_leased=0)


def foreign_registration(
    *,
    role: Role,
    incarnation: str,
    address: str,
    control: str,
    dialect: str,
    tp_size: int,
    dp_size: int,
    transfer_mode: TransferMode,
    index: int = 0,
    model: str = "",
    max_model_len: int = 0,
    steps: int = 0,
    load: Load = _UNKNOWN_LOAD,
) -> Register:
    """What is known of the server; what only our own agents say of themselves stays empty.

    It is ready: such a server pings, or is seen to be healthy, only then.
    """
    return Register(
        role=role,
        incarnation=incarnation,
        index=index,
        address=address,
        control=control,
        dialect=dialect,
        model=model,
        max_model_len=max_model_len,
        tp_size=tp_size,
        dp_size=dp_size,
        transfers=(),
        host_id="",
        layout="",
        weights="",
        tokenizer="",
        transfer_mode=transfer_mode,
        version="",
        state="ready",
        steps=steps,
        load=load,
    )
