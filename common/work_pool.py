# SPDX-License-Identifier: Apache-2.0
"""Threads for long work, so that an event loop goes on meanwhile.

A thread helps as far as its work lets go of the interpreter's lock, or consists of many short calls: one call
into C that keeps the lock stops the loop for as long as it takes.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_Job = tuple["Future[Any]", Callable[[], Any]]
_BUILDING = threading.Lock()


def build_struct_types() -> None:
    """Have msgspec describe every struct that has been imported, before a thread starts that decodes any.

    Else it does so when a struct is first decoded, of its annotations. That runs Python code, so another
    thread may come to the same struct meanwhile and find it half described: the process ends with a
    segmentation fault (msgspec 0.22.0).
    """
    with _BUILDING:
        kinds = [*msgspec.Struct.__subclasses__()]
        while kinds:
            kind = kinds.pop()
            kinds += kind.__subclasses__()
            # Structs that are never decoded may have annotations that cannot be, or are unknown at run time.
            with suppress(TypeError, NameError):
                msgspec.json.Decoder(kind)


class WorkPool:
    """One thread for short work and one for long, so that short work never waits for long. They end with the
    process.

    Args:
        name: Of the threads.
        short_bytes: The size up to which work is short.
        max_bytes: Of all work that waits or is being done.
        timeout_s: How long it waits, its own time included.
        busy: Makes what is raised where work was not done, of the reason: too much of it waits, or its turn
            did not come in time.
    """

    def __init__(
        self,
        name: str,
        *,
        short_bytes: int,
        max_bytes: int,
        timeout_s: float,
        busy: Callable[[str], Exception],
    ) -> None:
        build_struct_types()  # the loop and its threads may parse alike
        self._name = name
        self._short_bytes = short_bytes
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._busy = busy
        self._queued_bytes = 0
        self._queues: dict[str, queue.SimpleQueue[_Job]] = {}

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return what `work` on `size` bytes returns, or raise what it raises, or `busy` makes."""
        if self._queued_bytes and self._queued_bytes + size > self._max_bytes:
            raise self._busy("too much waits")
        job: Future[_T] = Future()
        loop = asyncio.get_running_loop()
        self._queued_bytes += size
        self._queue("short" if size <= self._short_bytes else "long").put((job, work))
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, size))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            raise self._busy("its turn did not come in time") from None

    def _release(self, size: int) -> None:
        self._queued_bytes -= size

    def _queue(self, name: str) -> queue.SimpleQueue[_Job]:
        if name not in self._queues:
            jobs = self._queues[name] = queue.SimpleQueue()
            # A daemon: the process ends without waiting for it (design I8).
            threading.Thread(target=_work, args=(jobs,), name=f"{self._name}-{name}", daemon=True).start()
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
        # Nothing of the last work is kept while waiting for the next.
        del job, work
        result = None
