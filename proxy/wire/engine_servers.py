# SPDX-License-Identifier: Apache-2.0
"""Registrations of other engines' servers, made of what their pings or a health monitor say."""

from __future__ import annotations

from kvferry.common.engine_servers.monitor import ServerDown, ServerUp
from kvferry.common.engine_servers.probe import ServerLoad
from kvferry.common.roles import Role, TransferMode
from kvferry.proxy.wire.registration import Bye, Incarnation, Load, Register

ATOM_WITHOUT_INFO = "without /kv_transfer_info"
"""`Register.version` of ATOM servers that ping or do not know that path."""
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
    version: str = "",
    steps: int = 0,
    load: Load = _UNKNOWN_LOAD,
) -> Register:
    """Return the registration of another engine's server; what only native agents send stays empty.

    Its state is ready: such a server pings, or passes a health probe, only then.
    """
    return Register(
        role=role,
        incarnation=Incarnation(incarnation),
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
        version=version,
        state="ready",
        steps=steps,
        load=load,
    )


def registration_of(found: ServerUp | ServerDown) -> Register | Bye:
    """Return what the pings of a watched server would say."""
    if isinstance(found, ServerDown):
        return Bye(incarnation=Incarnation(found.incarnation))
    server, result = found.server, found.result
    return foreign_registration(
        role=server.role,
        incarnation=found.incarnation,
        index=found.index,
        address=server.address,
        control=server.control,
        dialect=server.dialect,
        model=result.model,
        max_model_len=result.max_model_len,
        version=ATOM_WITHOUT_INFO if server.info_path and result.info is None else "",
        tp_size=server.tp_size or 1,
        dp_size=server.dp_size or 1,
        transfer_mode=server.mode,
        steps=found.steps,
        load=load_of(result.load),
    )


def load_of(load: ServerLoad) -> Load:
    """Return a probed server's load as registrations carry it."""
    return Load(
        running=load.running,
        waiting=load.waiting,
        kv_blocks_free=load.kv_blocks_free,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_leased=0,
        max_running=load.max_running,
    )
