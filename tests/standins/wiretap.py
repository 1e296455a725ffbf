# SPDX-License-Identifier: Apache-2.0
"""Somebody on the network between a client and a server: sees every byte, can alter and repeat them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

Alter = Callable[[bytes], bytes]


class Wiretap:
    """A TCP relay to a port on loopback; victims are sent to `port`. Use as an async context manager."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.heard = bytearray()
        """What all clients have sent, as it went over the wire."""
        self.said = bytearray()
        """What the server has answered."""
        self.alter: Alter | None = None
        """Applied once, to what a client sends next: what a connection begins with may be a few bytes."""
        self.altered = asyncio.Event()
        self._target = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def replay(self) -> bytes:
        """Send all that was heard once more, on a connection of our own; returns what the server says."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            writer.write(bytes(self.heard))
            await writer.drain()
            writer.write_eof()
            async with asyncio.timeout(20):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pump(reader, far_writer, self.heard, self._altered))
                ways.create_task(self._pump(far_reader, writer, self.said, lambda data: data))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    def _altered(self, data: bytes) -> bytes:
        alter, self.alter = self.alter, None
        if alter is None:
            return data
        self.altered.set()
        return alter(data)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: bytearray, alter: Alter
    ) -> None:
        try:
            while data := await reader.read(65536):
                log += data
                writer.write(alter(data))
                await writer.drain()
        finally:
            writer.close()
