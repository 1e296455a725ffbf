# SPDX-License-Identifier: Apache-2.0
"""The reading GPU: exports and maps memory, and copies on streams of its own."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvferry.transfer.backends.cuda_ipc.driver import CudaError, Driver, ExportedMemory, MappedMemory
from kvferry.transfer.backends.cuda_ipc.settings import CudaIpcSettings
from kvferry.transfer.backends.cuda_ipc.work import WIDE_BYTES, Shape, Words, Work
from kvferry.transfer.engine import BackendUnavailable

if TYPE_CHECKING:
    import torch

MAX_LAUNCHES = 2
"""Launches in flight: one that copies, and the next, which keeps the link busy."""
_TABLE_ENTRIES = 1 << 16


class Launch(Protocol):
    """One launch.

    `begun` is the time of submission (`time.monotonic`), `seconds` the duration by the device's own clock,
    set once it is done.
    """

    begun: float
    seconds: float

    def done(self) -> bool:
        """Whether every byte is in our pool. Never blocks."""

    def wait(self) -> None:
        """Block until it is done."""


class Device(Protocol):
    """What an engine needs of a GPU."""

    def export_memory(self, address: int, nbytes: int) -> ExportedMemory:
        """Export memory to other processes. Raises `CudaError` for kinds that cannot be exported."""

    def map_memory(self, exported: ExportedMemory) -> MappedMemory:
        """Map another process's memory. Raises `CudaError` with the reason if it is out of reach."""

    def unmap_memory(self, mapped: MappedMemory) -> None:
        """Unmap. No launch may be reading from it."""

    def read_bytes(self, mapped: MappedMemory) -> bytes:
        """Copy a small mapping to the host."""

    def launch(self, work: Work) -> Launch:
        """Begin to copy. At most `MAX_LAUNCHES` may be in flight."""

    def close(self) -> None:
        """Release the GPU. No launch may be in flight."""


class CudaDevice:
    """An NVIDIA GPU; see `Device`. `computing` is set while the model computes there."""

    def __init__(self, pool: torch.Tensor, settings: CudaIpcSettings, computing: threading.Event) -> None:
        """Raises `BackendUnavailable` if the driver or Triton does not work with this pool's device."""
        import torch

        if not pool.is_cuda:
            raise BackendUnavailable("cuda_ipc: the pool is not on a GPU")
        try:
            from kvferry.transfer.backends.cuda_ipc.kernel import gather

            self._driver = Driver(pool.get_device())
        except (ImportError, CudaError) as error:
            raise BackendUnavailable(f"cuda_ipc: {error}") from error
        self._torch = torch
        self._multiprocessors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._settings = settings
        self._computing = computing
        # The lowest priority, which is also the default: a model on a stream of higher priority goes first
        # wherever both could start.
        self._gathers = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]
        self._slots = deque(_Slot(pool.device, self._gathers) for _ in range(MAX_LAUNCHES))
        self._driver.relax_capture()
        self._kernels: dict[bool, Any] = {}
        self._compile(gather, pool.device)

    def export_memory(self, address: int, nbytes: int) -> ExportedMemory:
        return self._driver.export_memory(address, nbytes)

    def map_memory(self, exported: ExportedMemory) -> MappedMemory:
        return self._driver.map_memory(exported)

    def unmap_memory(self, mapped: MappedMemory) -> None:
        self._driver.unmap_memory(mapped)

    def read_bytes(self, mapped: MappedMemory) -> bytes:
        return self._driver.read_bytes(mapped)

    def launch(self, work: Work) -> Launch:
        computing, num_gathered = self._computing.is_set(), work.num_spans
        if self._driver.has_batches:
            num_gathered = self._settings.num_gathered(work.num_spans, work.nbytes, computing)
        slot = self._slots.popleft()
        slot.make_room(work.table_size(num_gathered))
        most = self._settings.num_programs(self._multiprocessors, computing)
        shape = work.write_table(slot.table, num_gathered, most, self._settings.block_words)
        begun = time.monotonic()
        stretches = []
        self._driver.enter()
        try:
            # The kernel first: one call submits it, and it copies while the copies are submitted.
            if num_gathered:
                stretches.append(slot.gathering)
                slot.gathering.begin(self._gathers)
                self._gather(slot, num_gathered, shape)
                slot.gathering.end(self._gathers)
            if num_gathered < work.num_spans:
                stretches.append(slot.copying)
                slot.copying.begin(self._copies)
                self._copy(work.spans(slot.table, num_gathered)[num_gathered:])
                slot.copying.end(self._copies)
        finally:
            self._driver.leave()
        return CudaLaunch(slot, self._slots, begun, stretches)

    def close(self) -> None:
        self._slots.clear()
        self._driver.close()

    def _copy(self, spans: Words) -> None:
        destinations, sources, sizes = np.ascontiguousarray(spans[spans[:, 2] > 0].T)
        if len(sizes):
            self._driver.copy_batch(destinations, sources, sizes, self._copies.cuda_stream)

    def _gather(self, slot: _Slot, num_spans: int, shape: Shape) -> None:
        table, stream = slot.device_address, self._gathers.cuda_stream
        self._driver.upload(table, slot.host_address, (2 + 4 * num_spans) * slot.table.itemsize, stream)
        # The first time, this loads the kernel into the current context.
        kernel = self._kernels[shape.aligned][(shape.num_programs, 1, 1)]
        kernel(table, num_spans, shape.aligned, self._settings.block_words, stream=stream)

    def _compile(self, gather: Any, device: torch.device) -> None:
        """Compile both forms of the kernel now: later it would delay a request, or fail it. A launch calls
        the compiled kernel itself, as Triton's dispatcher costs more than everything else.
        """
        from triton.errors import TritonError

        scratch = self._torch.zeros(2 * WIDE_BYTES, dtype=self._torch.uint8, device=device)
        self._torch.cuda.current_stream(device).synchronize()
        settings = self._settings
        try:
            for aligned, length in ((True, WIDE_BYTES), (False, 1)):
                with self._torch.cuda.device(device):
                    self._kernels[aligned] = gather.warmup(
                        self._slots[0].there,
                        2,
                        ALIGNED=aligned,
                        BLOCK=settings.block_words,
                        num_warps=settings.num_warps,
                        grid=(1,),
                    )
                row = (scratch.data_ptr() + WIDE_BYTES, scratch.data_ptr(), length)
                self.launch(Work([np.array([row], dtype=np.int64)])).wait()
        except (TritonError, CudaError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.close()
            raise BackendUnavailable(f"cuda_ipc: its kernel does not work here: {error}") from error


class CudaLaunch:
    """One launch on a GPU; see `Launch`. Its slot is free again once it is done."""

    def __init__(self, slot: _Slot, free: deque[_Slot], begun: float, stretches: Sequence[_Stretch]) -> None:
        self._slot: _Slot | None = slot
        self._free = free
        self._stretches = stretches
        self.begun = begun
        self.seconds = 0.0

    def done(self) -> bool:
        # The host has seen the events, so everything launched from now on, an attention kernel above all,
        # sees the bytes: nothing on the GPU has to wait for these streams.
        if self._slot is not None and all(each.finished() for each in self._stretches):
            self._free_slot(self._slot)
        return self._slot is None

    def wait(self) -> None:
        for each in self._stretches:
            each.wait()
        if self._slot is not None:
            self._free_slot(self._slot)

    def _free_slot(self, slot: _Slot) -> None:
        self.seconds = max(each.seconds() for each in self._stretches)
        self._slot = None
        self._free.append(slot)


class _Stretch:
    """The time between two events of one stream."""

    def __init__(self) -> None:
        import torch

        self._begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self, stream: torch.cuda.Stream) -> None:
        self._begin.record(stream)

    def end(self, stream: torch.cuda.Stream) -> None:
        self._end.record(stream)

    def finished(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        self._end.synchronize()

    def seconds(self) -> float:
        """Its duration. It must be finished."""
        return float(self._begin.elapsed_time(self._end)) / 1e3


class _Slot:
    """Resources of one launch, reused by later ones: its table, on the host (pinned, so that the upload does
    not block) and on the device, and the events of its two parts.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """`stream` is the one whose kernels read the table."""
        self._device, self._stream = device, stream
        self.gathering, self.copying = _Stretch(), _Stretch()
        self._grow(_TABLE_ENTRIES)

    def make_room(self, entries: int) -> None:
        """Make room for a table of so many entries."""
        if entries > len(self.table):
            self._grow(1 << entries.bit_length())

    def _grow(self, entries: int) -> None:
        import torch

        self._host = torch.empty(entries, dtype=torch.int64, pin_memory=True)
        # torch reuses memory in the order of the stream it was allocated on. Were that the model's stream,
        # kernels queued there before it freed this memory could still write to it, over the table.
        with torch.cuda.stream(self._stream):
            self.there = torch.empty(entries, dtype=torch.int64, device=self._device)
        self.table = self._host.numpy()
        self.host_address, self.device_address = self._host.data_ptr(), self.there.data_ptr()
