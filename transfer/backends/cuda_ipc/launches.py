# SPDX-License-Identifier: Apache-2.0
"""Reads of the cuda_ipc backend, and the launches that carry them out.

A launch that is under way cannot be cancelled: a read that fails meanwhile is quiescent when its launch has
landed, which takes milliseconds. Reads that wait are launched together.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.backends.cuda_ipc.device import MAX_FLIGHTS, Device, Flight
from kvferry.transfer.backends.cuda_ipc.pace import Pace
from kvferry.transfer.backends.cuda_ipc.work import Work
from kvferry.transfer.engine import Status
from kvferry.transfer.layout import SpanTable

LAUNCH_BYTES = 1 << 30
"""A launch takes no further read beyond this, about 3 ms of an NVLink's time."""


class CudaIpcTransfer(BaseTransfer):
    """One read; see `transfer.engine.Transfer`. `source` is where the peer's pool lies for our device."""

    def __init__(self, spans: SpanTable, source: int, deadline: float) -> None:
        super().__init__(int(spans[:, 2].sum()), len(spans), deadline)
        self.spans = spans
        self.source = source
        self._in_flight = False
        if not self.nbytes:
            self.succeed()

    @property
    def quiescent(self) -> bool:
        return self._status is not Status.PENDING and not self._in_flight

    def take_off(self) -> None:
        self._in_flight = True

    def land(self) -> None:
        """Its bytes are in the pool."""
        self._in_flight = False
        self.succeed()


@dataclass(slots=True)
class _Launch:
    """One launch under way."""

    flight: Flight
    batch: list[CudaIpcTransfer]
    nbytes: int


class Launches:
    """Reads that wait, and those in flight, into one pool at `destination`."""

    def __init__(self, device: Device, destination: int) -> None:
        self._device = device
        self._destination = destination
        self._waiting: deque[CudaIpcTransfer] = deque()
        self._flights: deque[_Launch] = deque()
        self._begun = 0.0
        """When the GPU turned to the first of them."""
        self._pace = Pace()

    def add(self, transfer: CudaIpcTransfer) -> None:
        """Queue a read for the next launch."""
        if transfer.poll() is Status.PENDING:
            self._waiting.append(transfer)

    def progress(self, now: float) -> None:
        """End what has landed or run out of time, and launch what waits."""
        while self._flights and self._flights[0].flight.landed():
            self._land()
        for transfer in self._all():
            if transfer.deadline <= now:
                transfer.fail("deadline")
        while len(self._flights) < MAX_FLIGHTS and (batch := self._next_batch()):
            self._launch(batch)

    def next_look(self) -> float | None:
        """When a launch may have landed that has not yet."""
        if not self._flights:
            return None
        return self._pace.next_look(self._flights[0].nbytes, self._begun, time.monotonic())

    def next_deadline(self) -> float | None:
        pending = (each.deadline for each in self._all() if each.poll() is Status.PENDING)
        return min(pending, default=None)

    def settle(self) -> None:
        """Fail what has not ended, and wait until nothing is in flight."""
        for transfer in self._all():
            transfer.fail("peer_lost")
        self._waiting.clear()
        while self._flights:
            self._flights[0].flight.wait()
            self._land()

    def _launch(self, batch: list[CudaIpcTransfer]) -> None:
        work = Work([(each.spans, self._destination, each.source) for each in batch])
        flight = self._device.launch(work)
        if not self._flights:
            self._begun = flight.begun
        self._flights.append(_Launch(flight, batch, work.nbytes))
        for transfer in batch:
            transfer.take_off()

    def _land(self) -> None:
        launch = self._flights.popleft()
        self._pace.learn(launch.nbytes, launch.flight.seconds)
        self._begun = time.monotonic()
        for transfer in launch.batch:
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
        return [*(each for launch in self._flights for each in launch.batch), *self._waiting]
