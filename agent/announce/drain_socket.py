# SPDX-License-Identifier: Apache-2.0
"""How the process that has started an engine's server, and the announcement in that server, speak of a drain.

The one that has started it listens on a Unix socket. It asks there for a drain, and hears there that the
server has drained, also when a proxy had asked for that; then it ends the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.common.stop import StopRequest

DRAIN, DRAINED = b"drain\n", b"drained\n"


class Drainer:
    """The starter's end. Each data-parallel rank of the server connects.

    Args:
        stop: Made when all ranks have drained.
    """

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._ranks: set[asyncio.StreamWriter] = set()
        self._over = asyncio.Event()

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accept the ranks' connections on `path` while the context is open. Raises OSError."""
        async with await asyncio.start_unix_server(self._serve, path):
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ranks.add(writer)
        self._over.clear()
        has_drained = False
        try:
            has_drained = await reader.readline() == DRAINED
        finally:
            self._ranks.discard(writer)
            writer.close()
            if not self._ranks:
                self._over.set()
        if has_drained and not self._ranks:
            self._stop.make()

    async def drain(self) -> None:
        """Have the server drain, and wait until it has. A server that is not there, or goes, has."""
        if self._ranks:
            for rank in self._ranks:
                rank.write(DRAIN)
            await self._over.wait()


class DrainConnection:
    """The server's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, path: str) -> DrainConnection:
        """Connect to the process that has started this server. Raises OSError."""
        return cls(*await asyncio.open_unix_connection(path))

    async def read(self, asked: Callable[[], None]) -> None:
        """Call `asked` when the starter asks for a drain. Returns then, or when it has gone."""
        if await self._reader.readline() == DRAIN:
            asked()

    async def say_drained(self) -> None:
        """Say that the server has drained. Raises OSError."""
        self._writer.write(DRAINED)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()
