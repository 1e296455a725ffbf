# SPDX-License-Identifier: Apache-2.0
"""The ATOM engine's ping. Its nodes are listed; requests cannot be given to them yet.

Source of the format: ATOM at 0c982ea92, `kv_transfer_engine.py`, one msgpack map every 5 s.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from proxy.wire import BadFrame, Load, Register, Role

NAME = "atom"
_ROLES: dict[str, Role] = {"P": "prefill", "D": "decode"}


class _Ping(msgspec.Struct, frozen=True):
    type: Literal["register"]
    role: Literal["P", "D"]
    index: int | str
    request_address: str
    handshake_port: int
    dp_size: int
    tp_size: int
    transfer_mode: Literal["read", "write"]


def recognises(body: dict[str, Any]) -> bool:
    """Whether this map is an ATOM ping (right or wrong in its details)."""
    return body.get("type") == "register" and "request_address" in body


def registration(body: dict[str, Any]) -> Register:
    """Read an ATOM ping as a registration of ours; what it does not say stays empty. Raises `BadFrame`."""
    try:
        ping = msgspec.convert(body, _Ping)
        url = urlsplit(ping.request_address)
    except ValueError as error:
        raise BadFrame(str(error)) from error
    address = f"{url.scheme}://{url.netloc}"
    return Register(
        role=_ROLES[ping.role],
        # It has no incarnation, so a restart cannot be told from a late ping.
        incarnation=f"{NAME}:{address}",
        index=int(ping.index) if str(ping.index).isdecimal() else 0,
        address=address,
        control=f"tcp://{url.hostname}:{ping.handshake_port}",
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
        transfer_mode=ping.transfer_mode,
        version="",
        state="ready",
        steps=0,
        load=Load(running=0, waiting=0, kv_blocks_free=0, kv_blocks_total=0, kv_blocks_leased=0),
    )
