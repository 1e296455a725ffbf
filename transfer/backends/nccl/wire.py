# SPDX-License-Identifier: Apache-2.0
"""The bytes of the nccl backend: the reader's requests on the connection, and the messages that answer them.

WELCOME names the port where the two ends build a communicator. Then any number of REQUESTs, each followed by
its (offset, length) pieces, are answered in order over the communicator: one message per part of the read,
HEAD and then the bytes. Little endian throughout.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from kvferry.transfer.backends.common.handshake import HandshakeAddress, Protocol

ID_BYTES = 16
PART_BYTES = 8 << 20
"""Maximum of a pool's bytes in one message."""

HELLO = struct.Struct(f"<{ID_BYTES}sI")
"""Id of the new pair, milliseconds to build it in."""

WELCOME = struct.Struct("<H")
"""Port where the two ends build their communicator."""

PROTOCOL = Protocol(b"KVN1", hello_bytes=HELLO.size, welcome_bytes=WELCOME.size)

REQUEST = struct.Struct(f"<{ID_BYTES}sIQ")
"""Id of the read, milliseconds that it may take, count of pieces."""

PIECE = struct.Struct("<QQ")
"""Offset into the pool and length, in bytes."""

HEAD = struct.Struct(f"<4s{ID_BYTES}sQQ")
"""Magic, id of the read, number of the part, bytes that follow at `HEAD_BYTES`."""

HEAD_BYTES = 64

Pieces = list[tuple[int, int]]
"""(offset, length) in a pool, in the order of the stream."""


class NcclAddress(HandshakeAddress, frozen=True, kw_only=True):
    """An engine, and what moves its bytes: gloo or nccl."""

    fabric: str


def pack_head(read_id: bytes, number: int, nbytes: int) -> bytes:
    """The head of one message, padded."""
    return HEAD.pack(PROTOCOL.magic, read_id, number, nbytes).ljust(HEAD_BYTES, b"\0")


def tag(read_id: bytes, number: int) -> int:
    """Tag by which gloo matches a message. NCCL has no tags: there the head decides."""
    return zlib.crc32(number.to_bytes(8, "little"), zlib.crc32(read_id)) & 0x7FFFFFFF


def split(pieces: Iterable[tuple[int, int]], limit: int = PART_BYTES) -> list[Pieces]:
    """Split the stream of pieces into parts of at most `limit` bytes, the same at both ends."""
    parts: list[Pieces] = []
    room = 0
    for offset, length in pieces:
        while length:
            if room == 0:
                parts.append([])
                room = limit
            taken = min(length, room)
            parts[-1].append((offset, taken))
            offset, length, room = offset + taken, length - taken, room - taken
    return parts
