# SPDX-License-Identifier: Apache-2.0
"""What the operator's page shows, once a second, to everybody who looks: the page's SSE feed.

Nothing is computed while nobody looks, and once a second however many do. A viewer that reads slowly is
sent the newest snapshot when it reads again, never a backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvferry.proxy import sse
from kvferry.proxy.fleet.interface import Fleet

INTERVAL_S = 1.0
MAX_VIEWERS = 32
RECONNECT = b"retry: 2000\n\n"


class DashboardFeed:
    """Snapshots of one proxy for the viewers of its page."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._making = asyncio.Lock()
        self._closed = asyncio.Event()
        self._viewers = 0
        self._event = b""
        self._made_at = float("-inf")

    @property
    def full(self) -> bool:
        """Whether there is no room for another viewer."""
        return self._viewers >= MAX_VIEWERS

    def close(self) -> None:
        """End every feed, so that a stopping proxy need not wait for its viewers."""
        self._closed.set()

    async def feed(self) -> AsyncGenerator[bytes, None]:
        """One event a second until the viewer leaves (which closes the generator) or the proxy stops."""
        self._viewers += 1
        try:
            yield RECONNECT
            while not self._closed.is_set():
                yield await self._latest()
                try:
                    async with asyncio.timeout(INTERVAL_S):
                        await self._closed.wait()
                except TimeoutError:
                    continue
        finally:
            self._viewers -= 1

    async def _latest(self) -> bytes:
        """The event that every viewer of this second gets."""
        async with self._making:
            now = asyncio.get_running_loop().time()
            if now - self._made_at >= INTERVAL_S / 2:
                self._event = sse.event((await self._fleet.page("live")).body)
                self._made_at = now
            return self._event
