# SPDX-License-Identifier: Apache-2.0
"""Messages between two processes of one proxy, over a socket pair that only these two hold.

Frames are a length (4 bytes, big-endian) and that many bytes of msgpack, typed by msgspec. Either end sees
the other's end as the end of the stream, whatever it died of.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_UNSENT_BYTES = 64 * 1024 * 1024

Out = TypeVar("Out")
In = TypeVar("In")


class LinkLost(ConnectionError):
    """The other process has ended, or does not read any more."""


class Link(Generic[Out, In]):
    """One end. `send` from anywhere in the loop; `receive` from one task."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[In]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def over(cls, end: socket.socket, decoder: msgspec.msgpack.Decoder[In]) -> Link[Out, In]:
        """Talk over one end of a connected pair, which belongs to the link from now on."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, decoder)

    def send(self, message: Out) -> None:
        """Queue one message; never waits and never raises: that the other end is gone is told by `receive`.

        An end that has not read for so long that too much is queued for it counts as gone.
        """
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()
            return
        payload = self._encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> In:
        """The next message. Raises `LinkLost` at the end of the stream, and when it holds anything else."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise LinkLost(f"a frame of {length} bytes")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkLost("the other process has ended") from error
        except msgspec.DecodeError as error:
            raise LinkLost(f"not a message: {error}") from error

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._writer.close()
