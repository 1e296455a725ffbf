# SPDX-License-Identifier: Apache-2.0
"""Reads of the cuda_ipc backend, and the launches that carry them out.

A launch that is under way cannot be cancelled: a read that fails meanwhile is quiescent when its launch has
landed, which takes milliseconds. Reads that wait are launched together.
"""

from __future__ import annotations

from collections import deque

from transfer.backends.cuda_ipc_device import MAX_FLIGHTS, Device, Flight
from transfer.backends.cuda_ipc_work import Work
from transfer.engine import Status
from transfer.layout import SpanTable

LAUNCH_BYTES = 1 << 30
"""A launch takes no further read beyond this, about 3 ms of an NVLink's time."""


class CudaIpcTransfer:
    """One read; see `transfer.engine.Transfer`. `source` is where the peer's pool lies for our device."""

    def __init__(self, spans: SpanTable, source: int, deadline: float) -> None:
        self.spans = spans
        self.source = source
        self.deadline = deadline
        self.reason: str | None = None
        self.nbytes = int(spans[:, 2].sum())
        self.descriptors = len(spans)
        self._in_flight = False
        self._status = Status.PENDING if self.nbytes else Status.DONE

    @property
    def quiescent(self) -> bool:
        return self._status is not Status.PENDING and not self._in_flight

    def poll(self) -> Status:
        return self._status

    def cancel(self) -> None:
        self.fail("cancelled")

    def fail(self, reason: str) -> None:
        """End without the bytes, unless it has ended."""
        if self._status is Status.PENDING:
            self._status = Status.FAILED
            self.reason = reason

    def take_off(self) -> None:
        self._in_flight = True

    def land(self) -> None:
        """Its bytes are in the pool."""
        self._in_flight = False
        if self._status is Status.PENDING:
            self._status = Status.DONE


class Launches:
    """Reads that wait, and those in flight, into one pool at `destination`."""

    def __init__(self, device: Device, destination: int) -> None:
        self._device = device
        self._destination = destination
        self._waiting: deque[CudaIpcTransfer] = deque()
        self._flights: deque[tuple[Flight, list[CudaIpcTransfer]]] = deque()

    def add(self, transfer: CudaIpcTransfer) -> None:
        """Queue a read for the next launch."""
        if transfer.poll() is Status.PENDING:
            self._waiting.append(transfer)

    def progress(self, now: float) -> None:
        """End what has landed or run out of time, and launch what waits."""
        while self._flights and self._flights[0][0].landed():
            self._land()
        for transfer in self._all():
            if transfer.deadline <= now:
                transfer.fail("deadline")
        while len(self._flights) < MAX_FLIGHTS and (batch := self._next_batch()):
            work = Work([(each.spans, self._destination, each.source) for each in batch])
            self._flights.append((self._device.launch(work), batch))
            for transfer in batch:
                transfer.take_off()

    def next_deadline(self) -> float | None:
        pending = (each.deadline for each in self._all() if each.poll() is Status.PENDING)
        return min(pending, default=None)

    def settle(self) -> None:
        """Fail what has not ended, and wait until nothing is in flight."""
        for transfer in self._all():
            transfer.fail("peer_lost")
        self._waiting.clear()
        while self._flights:
            self._flights[0][0].wait()
            self._land()

    def _land(self) -> None:
        _, batch = self._flights.popleft()
        for transfer in batch:
            transfer.land()

    def _next_batch(self) -> list[CudaIpcTransfer]:
        """Reads that wait, in order, but those that have failed."""
        batch: list[CudaIpcTransfer] = []
        nbytes = 0
        while self._waiting and nbytes < LAUNCH_BYTES:
            transfer = self._waiting.popleft()
            if transfer.poll() is Status.PENDING:
                batch.append(transfer)
                nbytes += transfer.nbytes
        return batch

    def _all(self) -> list[CudaIpcTransfer]:
        return [*(each for _, batch in self._flights for each in batch), *self._waiting]
