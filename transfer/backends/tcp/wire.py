# SPDX-License-Identifier: Apache-2.0
"""The bytes that the tcp backend puts on a connection between two ranks. Little endian throughout.

A reader connects and sends GREETING; the server answers WELCOME. Then any number of REQUESTs, each
followed by its (offset, length) pieces, are answered in order by RESPONSE and the pieces' bytes.
"""

from __future__ import annotations

import struct

import msgspec

from kvferry.transfer.backends.common.address import Port
from kvferry.transfer.tokens import TOKEN_BYTES

MAGIC = b"KVF1"
NONCE_BYTES = 16
MAX_PIECES = 1 << 16

GREETING = struct.Struct(f"<4s{NONCE_BYTES}s{TOKEN_BYTES}s")
"""Magic, the nonce of the engine that is meant, token."""

WELCOME = struct.Struct("<4sB")
"""Magic, 1 if the greeting was accepted."""

REQUEST = struct.Struct("<QQ")
"""Number of the transfer, count of pieces."""

PIECE = struct.Struct("<QQ")
"""Offset into the pool and length, in bytes."""

RESPONSE = struct.Struct("<QQQ")
"""Number of the transfer, 1 if granted, count of bytes that follow."""


class TcpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's tcp engine listens, and which engine it is."""

    host: str
    port: Port
    nonce: bytes
