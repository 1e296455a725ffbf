# SPDX-License-Identifier: Apache-2.0
"""The tasks that serve requests now, so that a stopping proxy can end them and see them end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CUT_TIMEOUT_S = 2.0


class RequestTasks:
    """Owns what uvicorn does not: the task of a request that it has given up on is abandoned there."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def join(self) -> Callable[[], object]:
        """The current task serves a request from here on, until it is done. Returns what cancels it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task.cancel

    async def cut(self) -> None:
        """Cancel every request that still runs, as if its client had left, and wait until all have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CUT_TIMEOUT_S)
