# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the GPU of the cuda_ipc backend: this process's memory, and launches that a test may hold.

It keeps the promises of `transfer.backends.cuda_ipc.device.Device`, and fails a test that breaks its demands.
"""

from __future__ import annotations

import ctypes
import struct
import time

import numpy as np

from kvferry.transfer.backends.cuda_ipc.device import MAX_LAUNCHES
from kvferry.transfer.backends.cuda_ipc.driver import HANDLE_BYTES, CudaError, ExportedMemory, MappedMemory
from kvferry.transfer.backends.cuda_ipc.work import Work

_ADDRESS = struct.Struct("<Q")


class HostLaunch:
    """A launch that copies when `end` is called."""

    def __init__(self, work: Work, device: HostDevice) -> None:
        self._device = device
        self._done = False
        self.work = work
        self.begun, self.seconds = time.monotonic(), 0.0

    def end(self) -> None:
        """Copy. Idempotent."""
        if self._done:
            return
        self._done = True
        num_spans = self.work.num_spans
        table = np.zeros(self.work.table_size(num_spans), dtype=np.int64)
        self.work.write_table(table, num_spans, 1, 1)
        for destination, source, length in self.work.spans(table, num_spans).tolist():
            self._device.check_mapped(source)
            ctypes.memmove(destination, source, length)
        self._device.in_flight.remove(self)
        self.seconds = time.monotonic() - self.begun

    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        self.end()


class HostDevice:
    """See `Device`. With `hold`, launches wait until they are landed; `unreachable` refuses every handle."""

    def __init__(self) -> None:
        self.hold = False
        self.unreachable = False
        self.launched: list[HostLaunch] = []
        self.in_flight: list[HostLaunch] = []
        self.mapped: list[MappedMemory] = []
        self.closed = False

    def export_memory(self, address: int, nbytes: int) -> ExportedMemory:
        return ExportedMemory(handle=_ADDRESS.pack(address).ljust(HANDLE_BYTES), offset=0, nbytes=nbytes)

    def map_memory(self, exported: ExportedMemory) -> MappedMemory:
        if self.unreachable:
            raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        (address,) = _ADDRESS.unpack_from(exported.handle)
        mapped = MappedMemory(address=address, nbytes=exported.nbytes, mapping=address)
        self.mapped.append(mapped)
        return mapped

    def unmap_memory(self, mapped: MappedMemory) -> None:
        self.mapped.remove(mapped)

    def read_bytes(self, mapped: MappedMemory) -> bytes:
        return ctypes.string_at(mapped.address, mapped.nbytes)

    def launch(self, work: Work) -> HostLaunch:
        assert len(self.in_flight) < MAX_LAUNCHES
        launch = HostLaunch(work, self)
        self.launched.append(launch)
        self.in_flight.append(launch)
        if not self.hold:
            launch.end()
        return launch

    def close(self) -> None:
        assert not self.in_flight, "a launch is under way"
        assert not self.mapped, "memory is still borrowed"
        self.closed = True

    def check_mapped(self, address: int) -> None:
        """A GPU would fault here."""
        assert any(0 <= address - each.address < each.nbytes for each in self.mapped), "read while unmapped"
