# SPDX-License-Identifier: Apache-2.0
"""The bytes of the nccl backend: what a reader and a server say on their socket, and the head of a message.

A reader connects and sends GREETING; the server answers WELCOME, and both build a communicator of two. Then
any number of REQUESTs, each followed by its (offset, length) pieces, are answered in order over the
communicator: one message per part of the read, HEAD and then the bytes. Little endian throughout.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import msgspec

from kvferry.transfer.backends.common.address import Port
from kvferry.transfer.tokens import TOKEN_BYTES

MAGIC = b"KVN1"
ID_BYTES = 16
MAX_PIECES = 1 << 20
PART_BYTES = 8 << 20
"""Most bytes of a pool in one message."""

GREETING = struct.Struct(f"<4s{ID_BYTES}s{ID_BYTES}sI{TOKEN_BYTES}s")
"""Magic, the engine that is meant, id of the new pair, milliseconds to build it in, token."""

WELCOME = struct.Struct("<4sBH")
"""Magic, 1 if the greeting was accepted, port where the two meet to build their communicator."""

REQUEST = struct.Struct(f"<{ID_BYTES}sIQ")
"""Id of the read, milliseconds that it may take, count of pieces."""

PIECE = struct.Struct("<QQ")
"""Offset into the pool and length, in bytes."""

HEAD = struct.Struct(f"<4s{ID_BYTES}sQQ")
"""Magic, id of the read, number of the part, bytes that follow at `HEAD_BYTES`."""

HEAD_BYTES = 64

Pieces = list[tuple[int, int]]
"""(offset, length) in a pool, in the order of the stream."""


class NcclAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's engine listens, which engine it is, and what moves its bytes: gloo or nccl."""

    host: str
    port: Port
    nonce: bytes
    fabric: str


def pack_head(read_id: bytes, number: int, nbytes: int) -> bytes:
    """The head of one message, padded."""
    return HEAD.pack(MAGIC, read_id, number, nbytes).ljust(HEAD_BYTES, b"\0")


def tag(read_id: bytes, number: int) -> int:
    """What gloo matches a message by. NCCL knows no tags, and the head decides there."""
    return zlib.crc32(number.to_bytes(8, "little"), zlib.crc32(read_id)) & 0x7FFFFFFF


def split(pieces: Iterable[tuple[int, int]], limit: int = PART_BYTES) -> list[Pieces]:
    """The stream of pieces in parts of at most `limit` bytes; both ends come to the same parts."""
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
