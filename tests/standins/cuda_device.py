# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the GPU of the cuda_ipc backend: this process's memory, and launches that a test may hold.

It keeps the promises of `transfer.backends.cuda_ipc.device.Device`, and fails a test that breaks its demands.
"""

from __future__ import annotations

import ctypes
import struct
import time

import numpy as np

from kvferry.transfer.backends.cuda_ipc.device import MAX_FLIGHTS
from kvferry.transfer.backends.cuda_ipc.driver import HANDLE_BYTES, Borrowed, CudaError, Lent
from kvferry.transfer.backends.cuda_ipc.work import Work

_ADDRESS = struct.Struct("<Q")


class HostFlight:
    """A launch that copies when it is told to."""

    def __init__(self, work: Work, device: HostDevice) -> None:
        self._device = device
        self._over = False
        self.work = work
        self.begun, self.seconds = time.monotonic(), 0.0

    def land(self) -> None:
        """Copy. Idempotent."""
        if self._over:
            return
        self._over = True
        num_spans = self.work.num_spans
        table = np.zeros(self.work.table_size(num_spans), dtype=np.int64)
        self.work.write_table(table, num_spans, 1, 1)
        for destination, source, length in self.work.spans(table, num_spans).tolist():
            self._device.check_mapped(source)
            ctypes.memmove(destination, source, length)
        self._device.flights.remove(self)
        self.seconds = time.monotonic() - self.begun

    def landed(self) -> bool:
        return self._over

    def wait(self) -> None:
        self.land()


class HostDevice:
    """See `Device`. With `hold`, launches wait until they are landed; `unreachable` refuses every handle."""

    def __init__(self) -> None:
        self.hold = False
        self.unreachable = False
        self.launched: list[HostFlight] = []
        self.flights: list[HostFlight] = []
        self.borrowed: list[Borrowed] = []
        self.closed = False

    def lend(self, address: int, nbytes: int) -> Lent:
        return Lent(handle=_ADDRESS.pack(address).ljust(HANDLE_BYTES), offset=0, nbytes=nbytes)

    def borrow(self, lent: Lent) -> Borrowed:
        if self.unreachable:
            raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        (address,) = _ADDRESS.unpack_from(lent.handle)
        borrowed = Borrowed(address=address, nbytes=lent.nbytes, mapping=address)
        self.borrowed.append(borrowed)
        return borrowed

    def give_back(self, borrowed: Borrowed) -> None:
        self.borrowed.remove(borrowed)

    def peek(self, borrowed: Borrowed) -> bytes:
        return ctypes.string_at(borrowed.address, borrowed.nbytes)

    def launch(self, work: Work) -> HostFlight:
        assert len(self.flights) < MAX_FLIGHTS
        flight = HostFlight(work, self)
        self.launched.append(flight)
        self.flights.append(flight)
        if not self.hold:
            flight.land()
        return flight

    def close(self) -> None:
        assert not self.flights, "a launch is under way"
        assert not self.borrowed, "memory is still borrowed"
        self.closed = True

    def check_mapped(self, address: int) -> None:
        """A GPU would fault here."""
        assert any(0 <= address - each.address < each.nbytes for each in self.borrowed), "read while unmapped"
