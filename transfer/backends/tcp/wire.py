# SPDX-License-Identifier: Apache-2.0
"""The bytes that the tcp backend puts on a connection between two ranks, behind the handshake.

Any number of REQUESTs, each followed by its (offset, length) pieces, are answered in order by RESPONSE and
the pieces' bytes. Little endian throughout.
"""

from __future__ import annotations

import struct

from kvferry.transfer.backends.common.handshake import Protocol

PROTOCOL = Protocol(b"KVF1")

REQUEST = struct.Struct("<QQ")
"""Number of the transfer, count of pieces."""

PIECE = struct.Struct("<QQ")
"""Virtual offset into the pool and length, in bytes."""
PIECE_COLUMNS = "<u8"
"""The type of an array with a row for each piece."""

RESPONSE = struct.Struct("<QQQ")
"""Number of the transfer, 1 if granted, count of bytes that follow."""
