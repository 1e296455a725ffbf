# SPDX-License-Identifier: Apache-2.0
"""A queue pair: work requests are carried out in the order in which they were posted, by a thread of its own.

A NIC needs no interpreter, and has carried out a few KiB before its caller looks. A thread would wait for its
turn meanwhile, so what is small and has nothing before it is carried out as it is posted.

The first that fails breaks the queue pair, and everything posted after it fails unexecuted. A batch
spreads over several queue pairs; its status turns to an error at the first failure on any of them, while the
others may still be writing.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mori.cpp import StatusCode, TransferStatus
from mori.io import memory
from mori.io.faults import Faults

_AT_ONCE_BYTES = 8192


@dataclass
class Batch:
    """One status, and how much of what it stands for is still missing."""

    status: TransferStatus
    missing: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, count: int) -> None:
        with self.lock:
            self.missing -= count
            if not self.missing:
                self.status.Update(StatusCode.SUCCESS, "success")

    def fail(self, message: str) -> None:
        self.status.Update(StatusCode.ERR_RDMA_OP, message)


@dataclass
class WorkRequest:
    """What is posted at once: `count` work requests of the real library, of one or more pieces each.

    `pieces` are int64 rows of (local address, remote address, length); without any it is a notification.
    """

    batch: Batch
    pieces: Any
    count: int
    read: bool
    notify: Callable[[], None] | None = None

    @property
    def small(self) -> bool:
        return self.notify is not None or int(self.pieces[:, 2].sum()) <= _AT_ONCE_BYTES


class QueuePair:
    """One lane to one remote process."""

    def __init__(
        self, lane: int, depth: int, remote: tuple[int, int], faults: Faults, broke: Callable[[str], None]
    ) -> None:
        """`remote`: the process, and when it started. `broke` is told why, once."""
        self.depth = depth
        self._broke = broke
        self._lane = lane
        self._remote = remote
        self._faults = faults
        self._queue: queue.SimpleQueue[WorkRequest | None] = queue.SimpleQueue()
        self._posting = threading.Lock()
        self._posted = 0
        self._ended = 0
        self._number = 0
        """Of what is carried out next: what faults count."""
        self._broken = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mori-qp-{lane}", daemon=True)
        self._thread.start()

    @property
    def outstanding(self) -> int:
        """Work requests posted and not ended."""
        return self._posted - self._ended

    def post(self, request: WorkRequest) -> None:
        with self._posting:
            idle = not self.outstanding
            self._posted += request.count
            if idle and request.small and not self._faults:
                self._take(request)
            else:
                self._queue.put(request)

    def close(self) -> None:
        """Destroy it: nothing is written afterwards, and statuses stay as they are."""
        self._stopping.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            request = self._queue.get()
            if request is None:
                return
            self._take(request)

    def _take(self, request: WorkRequest) -> None:
        if not self._broken:
            self._carry_out(request)
        elif request.notify is None:
            request.batch.fail("Work Request Flushed Error")
        self._number += request.notify is None
        self._ended += request.count

    def _carry_out(self, request: WorkRequest) -> None:
        if request.notify is not None:
            request.notify()
            return
        if self._stopping.wait(self._pause()):
            return
        try:
            self._suffer()
            pid, started = self._remote
            if memory.started(pid) != started:
                raise memory.MemoryGone(f"process {pid} is another one now")
            memory.copy(pid, request.pieces, read=request.read)
        except memory.MemoryGone as error:
            self._broken = True
            request.batch.fail(f"transport retry counter exceeded ({error})")
            self._broke(str(error))
            return
        request.batch.complete(request.count)

    def _pause(self) -> float:
        seconds = 0.0
        for kind, fault in self._faults.items():
            if kind == "delay" or (kind == "stall" and fault.hits(self._lane, self._number)):
                seconds += fault.seconds
            elif kind == "jitter":
                seconds += random.random() * fault.seconds
        return seconds

    def _suffer(self) -> None:
        fail, die = self._faults.get("fail"), self._faults.get("die")
        if die is not None and die.hits(self._lane, self._number):
            os.kill(os.getpid(), signal.SIGKILL)
        if fail is not None and fail.hits(self._lane, self._number):
            raise memory.MemoryGone("a fault")
