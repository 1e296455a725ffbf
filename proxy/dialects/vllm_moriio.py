# SPDX-License-Identifier: Apache-2.0
"""The ping of vLLM's MoRIIO connector. Its nodes are listed; requests cannot be given to them yet.

Source of the format: vLLM 0.33.0, `moriio_toy_proxy_server.py`, one msgpack map every 3 s.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from proxy.wire import BadFrame, Load, Register, Role

NAME = "vllm-moriio"
_ROLES: dict[str, Role] = {"P": "prefill", "D": "decode"}


class _Ping(msgspec.Struct, frozen=True):
    type: Literal["P", "D"]
    http_address: str
    zmq_address: str
    dp_size: int
    tp_size: int
    transfer_mode: Literal["READ", "WRITE"]


def recognises(body: dict[str, Any]) -> bool:
    """Whether this map is a MoRIIO ping (right or wrong in its details)."""
    return body.get("type") in tuple(_ROLES) and "http_address" in body


def registration(body: dict[str, Any]) -> Register:
    """Read a MoRIIO ping as a registration of ours; what it does not say stays empty. Raises `BadFrame`."""
    try:
        ping = msgspec.convert(body, _Ping)
    except ValueError as error:
        raise BadFrame(str(error)) from error
    return Register(
        role=_ROLES[ping.type],
        # It has no incarnation, so a restart cannot be told from a late ping.
        incarnation=f"{NAME}:{ping.http_address}",
        index=0,
        address=f"http://{ping.http_address}",
        # "host:IP,handshake:PORT,notify:PORT": kept as it is, for nobody dials it yet.
        control=ping.zmq_address,
        dialect=NAME,
        model="",
        max_model_len=0,
        tp_size=ping.tp_size,
        dp_size=ping.dp_size,
        transfers=(),
        host_id="",
        layout="",
        weights="",
        tokenizer="",
        transfer_mode="read" if ping.transfer_mode == "READ" else "write",
        version="",
        state="ready",
        steps=0,
        load=Load(running=0, waiting=0, kv_blocks_free=0, kv_blocks_total=0, kv_blocks_leased=0),
    )
