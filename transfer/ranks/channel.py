# SPDX-License-Identifier: Apache-2.0
"""Frames between an engine process and its ranks, over a Unix socket.

Both ends are on one host and of one incarnation, so nothing has to be queued for a peer that comes back. ZMQ
passes every frame through a thread of its own at either end, which took 0.2 to 0.4 ms where it was measured,
twice in every step and every read; here a frame wakes only the other end.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
_MAX_QUEUED_BYTES = 64 << 20
"""Limit of what waits for a rank that does not read."""
_BACKLOG = 128
_SEND_S = 30.0
_RECEIVE_BYTES = 1 << 16


class OversizedFrame(Exception):
    """A frame is longer than any valid one: a defect, or not one of our processes."""


class RankGone(Exception):
    """The frame was not queued: the rank has left, or does not read."""


class Frames:
    """Splits a stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are whole now. Raises `OversizedFrame`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise OversizedFrame(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield frame


def packed(frame: bytes) -> bytes:
    return _LENGTH.pack(len(frame)) + frame


class RankConnection(asyncio.Protocol):
    """One rank, as the engine process sees it. `on_lost` is called when the connection has ended."""

    def __init__(
        self,
        on_frame: Callable[[RankConnection, bytes], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    def send(self, frame: bytes) -> None:
        """Send or queue; never waits. Raises `RankGone`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise RankGone("it has left")
        if transport.get_write_buffer_size() + len(frame) > _MAX_QUEUED_BYTES:
            raise RankGone("it does not read")
        transport.write(packed(frame))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._on_frame(self, frame)
        except OversizedFrame:
            self.close()
            raise

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._on_lost is not None:
            self._on_lost()


class RankListener:
    """The server of an agent's ranks, on the engine process's loop."""

    def __init__(self, on_frame: Callable[[RankConnection, bytes], None]) -> None:
        self._on_frame = on_frame
        self._server: asyncio.Server | None = None
        self._connections: list[RankConnection] = []

    async def start(self, path: Path) -> None:
        """Listen. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            self._connected, path, backlog=_BACKLOG
        )

    def close(self) -> None:
        """Stop listening, and close the connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _connected(self) -> RankConnection:
        connection = RankConnection(self._on_frame)
        self._connections.append(connection)
        return connection


class RankEnd:
    """A rank's end, for one thread.

    Once the engine process has gone, sending does nothing: the agent ends, and the thread with it (I8).
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(_SEND_S)
        self._frames = Frames()
        self.gone = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Raises TimeoutError if the engine process does not read."""
        try:
            self._socket.sendall(packed(frame))
        except ConnectionError:
            self.gone = True

    def frames(self) -> Iterator[bytes]:
        """Each frame as it comes, until the engine process has gone. Raises `OversizedFrame`."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while not self.gone:
            poller.poll()
            yield from self.receive()

    def receive(self) -> Iterator[bytes]:
        """The frames that have come. Never waits. Raises `OversizedFrame`."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self.gone = not data
        yield from self._frames.feed(data)

    def close(self) -> None:
        self._socket.close()


async def dial(
    to: Path | socket.socket,
    on_frame: Callable[[RankConnection, bytes], None],
    on_lost: Callable[[], None] | None = None,
) -> RankConnection:
    """Connect an engine process to a rank that listens, or by what leads to it. Raises OSError if it does
    not listen.
    """
    loop = asyncio.get_running_loop()
    path, end = (str(to), None) if isinstance(to, Path) else (None, to)
    _, connection = await loop.create_unix_connection(
        lambda: RankConnection(on_frame, on_lost), path, sock=end
    )
    return connection


class RankSocket:
    """Where a rank listens for its engine process, which connects once.

    Raises OSError if the path is taken or invalid. Who can open the path can command the rank: its directory
    must be private.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(path))
            self._socket.listen(1)
        except OSError:
            self._socket.close()
            raise

    def accept(self, stopped: socket.socket) -> RankEnd | None:
        """Wait for the engine process; None if `stopped` turned readable before. Closes the socket.

        Without a deadline: the rank's owner knows how long an engine may take to start, and stops it.
        """
        try:
            waiting = select.poll()  # an engine's rank may have more descriptors than `select` takes
            for each in (self._socket, stopped):
                waiting.register(each, select.POLLIN)
            ready = {number for number, _ in waiting.poll()}
            return None if stopped.fileno() in ready else RankEnd(self._socket.accept()[0])
        finally:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def connect_at_once(path: Path) -> RankEnd:
    """Connect a rank to an engine process that listens. Raises OSError if it does not."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(str(path))
    except OSError:
        end.close()
        raise
    return RankEnd(end)
