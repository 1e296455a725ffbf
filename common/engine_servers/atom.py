# SPDX-License-Identifier: Apache-2.0
"""What an ATOM server reports of itself on `GET /kv_transfer_info` (ffdf3bb5d, docs/sources.md#atom)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.common.exceptions import NOT_JSON
from kvferry.common.roles import Role

HANDSHAKE_PORT = 6301
"""The default of its `handshake_port`."""
INFO_PATH = "/kv_transfer_info"
MAX_PARALLEL = 4096
"""Ranks of one kind that a server may report."""
_KV_ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}
_Count = Annotated[int, Meta(ge=1, le=MAX_PARALLEL)]


class KvTransferInfo(msgspec.Struct, frozen=True):
    """The answer to `GET /kv_transfer_info`. `kv_role` is None at a server that moves no KV."""

    tp_size: _Count
    dp_size: _Count
    kv_role: str | None
    handshake_port: Annotated[int, Meta(ge=1, le=65535)]

    @property
    def role(self) -> Role | None:
        """The leg that the server takes; None where it takes neither."""
        return None if self.kv_role is None else _KV_ROLES.get(self.kv_role)


def read_info(raw: bytes) -> KvTransferInfo:
    """Parse that answer. Raises `ValueError`."""
    try:
        return msgspec.json.decode(raw, type=KvTransferInfo)
    except NOT_JSON as error:
        raise ValueError(f"{INFO_PATH} cannot be read: {error}") from error
