# SPDX-License-Identifier: Apache-2.0
"""The tasks that serve requests now, so that a stopping proxy can end them and see them end."""

from __future__ import annotations

import asyncio

CUT_TIMEOUT_S = 2.0


class OpenRequests:
    """Owns what Quart does not: the task of a request that the server has given up on is abandoned there."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def join(self) -> None:
        """The current task serves a request from here on, until it is done."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cut(self) -> None:
        """Cancel every request that still runs, as if its client had left, and wait until all have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CUT_TIMEOUT_S)
