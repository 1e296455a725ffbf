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
    """The starter's end.

    Args:
        stop: Made when the server has drained.
    """

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._server: asyncio.StreamWriter | None = None
        self._over = asyncio.Event()

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accept the server's connection on `path` while the context is open. Raises OSError."""
        async with await asyncio.start_unix_server(self._serve, path):
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = writer
        self._over.clear()
        try:
            if await reader.readline() == DRAINED:
                self._stop.make()
        finally:
            self._over.set()
            writer.close()

    async def drain(self) -> None:
        """Have the server drain, and wait until it has. A server that is not there, or goes, has."""
        if self._server is not None and not self._server.is_closing():
            self._server.write(DRAIN)
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
