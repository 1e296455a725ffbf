# SPDX-License-Identifier: Apache-2.0
"""How many legs may be open at once; the others wait, and get places in the order in which they came."""

from __future__ import annotations

import asyncio


class ConnectionLimit:
    """As many places as there may be connections to agents."""

    def __init__(self, count: int) -> None:
        self.free = count
        """How many nobody has; 0 while anybody waits."""
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def take(self, by: float) -> None:
        """Have a place until it is given back. Raises `TimeoutError` at `by`, on the event loop's clock."""
        if self.free:
            self.free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            async with asyncio.timeout_at(by):
                await turn
        except BaseException:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Pass a place on to whoever has waited for longest."""
        while self._waiting:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            if not turn.done():  # else it is leaving
                turn.set_result(None)
                return
        self.free += 1
