# SPDX-License-Identifier: Apache-2.0
"""Reads of the cuda_ipc backend, and the launches that carry them out.

A launch in flight cannot be cancelled: a read that fails meanwhile is quiescent once its launch is done,
which takes milliseconds. Waiting reads are launched together.

CUDA can put a thread to sleep until an event, but its waking took 0.3 to 0.5 ms on the machine where this was
measured, of the 3 ms that a gigabyte takes. So the transfer thread sleeps by the clock, for the time that the
link needs at its best, and then polls at short intervals.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.backends.cuda_ipc.device import MAX_LAUNCHES, Device, Launch
from kvferry.transfer.backends.cuda_ipc.work import Words, Work
from kvferry.transfer.engine import Status

LAUNCH_BYTES = 1 << 30
"""A launch of this size takes no further read: about 3 ms of an NVLink's time."""
_POLL_S, _LATE_SHARE = 20e-6, 0.1
"""Time between two polls: at least the one, and this share of the time by which a launch is late."""
_MIN_SAMPLE_BYTES = 64 << 20
"""Smaller launches measure the launch rather than the link."""
_DECAY = 0.995


class CudaIpcTransfer(BaseTransfer):
    """One read; see `transfer.engine.Transfer`. `spans` are by address: destination, source and length."""

    def __init__(self, spans: Words, deadline: float) -> None:
        super().__init__(int(spans[:, 2].sum()), len(spans), deadline)
        self.spans = spans
        self._in_flight = False
        if not self.nbytes:
            self.succeed()

    @property
    def quiescent(self) -> bool:
        return self._status is not Status.PENDING and not self._in_flight

    def begin(self) -> None:
        self._in_flight = True

    def end(self) -> None:
        """Succeed: its bytes are in the pool."""
        self._in_flight = False
        self.succeed()


class PollPacer:
    """Estimates the shortest duration of a launch from earlier ones. They take longer while the model
    computes.

    All times are of `time.monotonic`.
    """

    def __init__(self) -> None:
        self._best = 0.0  # bytes per second

    def next_poll(self, nbytes: int, begun: float, now: float) -> float:
        """When to poll a launch next that is not done."""
        first = begun + (nbytes / self._best if self._best else 0.0)
        return max(first, now + max(_POLL_S, _LATE_SHARE * (now - first)))

    def learn(self, nbytes: int, seconds: float) -> None:
        """Update the estimate with a launch's duration, by the device's own clock."""
        if nbytes >= _MIN_SAMPLE_BYTES and seconds > 0:
            self._best = max(_DECAY * self._best, nbytes / seconds)


@dataclass(slots=True)
class _Batch:
    """Reads that one launch carries out."""

    launch: Launch
    reads: list[CudaIpcTransfer]
    nbytes: int


class Launches:
    """Waiting reads, and those in flight, into one pool."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._waiting: deque[CudaIpcTransfer] = deque()
        self._in_flight: deque[_Batch] = deque()
        self._begun = 0.0
        """When the GPU began with the first of them."""
        self._pacer = PollPacer()

    def add(self, transfer: CudaIpcTransfer) -> None:
        """Queue a read for the next launch."""
        if transfer.poll() is Status.PENDING:
            self._waiting.append(transfer)

    def progress(self, now: float) -> None:
        """Complete launches that are done, fail reads past their deadline, and launch waiting ones."""
        while self._in_flight and self._in_flight[0].launch.done():
            self._end_first()
        for transfer in self._all():
            if transfer.deadline <= now:
                transfer.fail("deadline")
        while len(self._in_flight) < MAX_LAUNCHES and (reads := self._next_reads()):
            self._launch(reads)

    def next_poll(self) -> float | None:
        """When the first launch in flight may be done."""
        if not self._in_flight:
            return None
        return self._pacer.next_poll(self._in_flight[0].nbytes, self._begun, time.monotonic())

    def next_deadline(self) -> float | None:
        pending = (each.deadline for each in self._all() if each.poll() is Status.PENDING)
        return min(pending, default=None)

    def settle(self) -> None:
        """Fail all pending reads, and block until nothing is in flight."""
        for transfer in self._all():
            transfer.fail("peer_lost")
        self._waiting.clear()
        while self._in_flight:
            self._in_flight[0].launch.wait()
            self._end_first()

    def _launch(self, reads: list[CudaIpcTransfer]) -> None:
        work = Work([each.spans for each in reads])
        launch = self._device.launch(work)
        if not self._in_flight:
            self._begun = launch.begun
        self._in_flight.append(_Batch(launch, reads, work.nbytes))
        for transfer in reads:
            transfer.begin()

    def _end_first(self) -> None:
        batch = self._in_flight.popleft()
        self._pacer.learn(batch.nbytes, batch.launch.seconds)
        self._begun = time.monotonic()
        for transfer in batch.reads:
            transfer.end()

    def _next_reads(self) -> list[CudaIpcTransfer]:
        """The waiting reads of the next launch, in order, without those that have failed."""
        reads: list[CudaIpcTransfer] = []
        nbytes = 0
        while self._waiting and nbytes < LAUNCH_BYTES:
            transfer = self._waiting.popleft()
            if transfer.poll() is Status.PENDING:
                reads.append(transfer)
                nbytes += transfer.nbytes
        return reads

    def _all(self) -> list[CudaIpcTransfer]:
        return [*(each for batch in self._in_flight for each in batch.reads), *self._waiting]
