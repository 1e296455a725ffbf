# SPDX-License-Identifier: Apache-2.0
"""Threads for the long work on texts, templates and tokenizing, so that the event loop goes on meanwhile.

One thread takes short texts and one long ones: a short text never waits for a long one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvferry.agent.errors import unavailable

SHORT_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Of all texts that wait or are being worked on."""
TEXT_TIMEOUT_S = 30.0
"""How long a request waits for its text, the work included."""

_T = TypeVar("_T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class TextPool:
    """Two threads with a queue each, bounded in bytes and in time. They end with the process."""

    def __init__(self) -> None:
        self._queued_bytes = 0
        self._queues: dict[str, queue.SimpleQueue[_Job]] = {}

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return what `work` on a text of `size` bytes returns, or raise what it raises.

        Raises:
            ApiError: 503, too much text waits, or it did not get its turn in time.
        """
        if self._queued_bytes and self._queued_bytes + size > MAX_QUEUED_BYTES:
            raise unavailable("tokenizer_busy", "too many long texts wait for the tokenizer")
        job: Future[_T] = Future()
        loop = asyncio.get_running_loop()
        self._queued_bytes += size
        self._queue("short" if size <= SHORT_BYTES else "long").put((job, work))
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, size))
        try:
            async with asyncio.timeout(TEXT_TIMEOUT_S):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise unavailable("tokenizer_busy", "the tokenizer did not get to this text in time") from None

    def _release(self, size: int) -> None:
        self._queued_bytes -= size

    def _queue(self, name: str) -> queue.SimpleQueue[_Job]:
        if name not in self._queues:
            jobs = self._queues[name] = queue.SimpleQueue()
            # A daemon: the process ends without waiting for a text (design I8).
            threading.Thread(target=_work, args=(jobs,), name=f"texts-{name}", daemon=True).start()
        return self._queues[name]


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        job, work = jobs.get()
        if not job.set_running_or_notify_cancel():
            continue
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 (it is raised where the request waits)
            job.set_exception(error)
        else:
            job.set_result(result)
        # Nothing of the last text is kept while waiting for the next.
        del job, work
        result = None
