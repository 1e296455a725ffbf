# SPDX-License-Identifier: Apache-2.0
"""Many writers, one reader, and a bound on what lies in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class BoundedQueue:
    """Writers wait while `capacity` items have not been taken, so a slow reader slows them down.

    Closing is not bounded: it can be done from a callback, whatever state the reader is in.
    """

    def __init__(self, capacity: int) -> None:
        self._room = asyncio.Semaphore(capacity)
        self._items: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def put(self, item: bytes) -> None:
        """Add an item, if need be after a wait."""
        await self._room.acquire()
        self._items.put_nowait(item)

    def close(self) -> None:
        """No more will come."""
        self._items.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What was put, up to `close`."""
        while (item := await self._items.get()) is not None:
            self._room.release()
            yield item
