# SPDX-License-Identifier: Apache-2.0
"""The reading GPU: it lends and borrows memory, and copies on a stream of its own."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from transfer.backends.cuda_ipc_driver import Borrowed, CudaError, Driver, Lent
from transfer.backends.cuda_ipc_settings import CudaIpcSettings
from transfer.backends.cuda_ipc_work import WIDE_BYTES, Work
from transfer.engine import BackendUnavailable

if TYPE_CHECKING:
    import torch

MAX_FLIGHTS = 2
"""Launches under way: one that copies, and the next, so that the link does not wait for us."""
_TABLE_ENTRIES = 1 << 16
_CLOSE_S = 5.0


class Flight(Protocol):
    """One launch."""

    def landed(self) -> bool:
        """Whether everything is in our pool. Never waits."""

    def wait(self) -> None:
        """Wait until it is."""


class Device(Protocol):
    """What an engine needs of a GPU."""

    def lend(self, address: int, nbytes: int) -> Lent:
        """Make our memory known to other processes. Raises `CudaError` for kinds that cannot be lent."""

    def borrow(self, lent: Lent) -> Borrowed:
        """Map another process's memory. Raises `CudaError` with the reason if we cannot reach it."""

    def give_back(self, borrowed: Borrowed) -> None:
        """Unmap it. No launch may be reading from it."""

    def peek(self, borrowed: Borrowed) -> bytes:
        """Its bytes, for a few of them."""

    def launch(self, work: Work) -> Flight:
        """Begin to copy, after the launches before it. At most `MAX_FLIGHTS` may be under way."""

    def close(self) -> None:
        """Let go of the GPU. No launch may be under way."""


class CudaDevice:
    """An NVIDIA GPU; see `Device`.

    `computing` is set while the model computes there. `on_landed` is called from a thread of its own after
    every launch.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        settings: CudaIpcSettings,
        computing: threading.Event,
        on_landed: Callable[[], None],
    ) -> None:
        """Raises `BackendUnavailable` if the driver or Triton does not work with this pool's device."""
        import torch

        if not pool.is_cuda:
            raise BackendUnavailable("cuda_ipc: the pool is not on a GPU")
        try:
            from transfer.backends import cuda_ipc_kernel as kernel

            self._driver = Driver(pool.get_device())
        except (ImportError, CudaError) as error:
            raise BackendUnavailable(f"cuda_ipc: {error}") from error
        self._torch = torch
        self._kernel = kernel
        self._multiprocessors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._settings = settings
        self._computing = computing
        # The lowest priority there is, which is also the default one: a model that runs on a stream of higher
        # priority goes first wherever both could start.
        self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]
        self._tables = deque(_Table(pool.device) for _ in range(MAX_FLIGHTS))
        self._driver.relax_capture()
        self._watcher = _Watcher(self._driver, on_landed)
        self._compile(pool.device)

    def lend(self, address: int, nbytes: int) -> Lent:
        return self._driver.lend(address, nbytes)

    def borrow(self, lent: Lent) -> Borrowed:
        return self._driver.borrow(lent)

    def give_back(self, borrowed: Borrowed) -> None:
        self._driver.give_back(borrowed)

    def peek(self, borrowed: Borrowed) -> bytes:
        return self._driver.peek(borrowed)

    def launch(self, work: Work) -> Flight:
        most = self._settings.num_programs(self._multiprocessors, self._computing.is_set())
        programs = work.num_programs(most, self._settings.block_words)
        table = self._tables.popleft()
        size = work.table_size(programs)
        work.write_table(table.room(size), programs)
        done = self._torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with self._torch.cuda.stream(self._stream):
            self._kernel.gather[(programs,)](
                table.upload(size),
                work.num_spans,
                programs,
                ALIGNED=work.aligned,
                BLOCK=self._settings.block_words,
                num_warps=self._settings.num_warps,
            )
            done.record(self._stream)
        flight = CudaFlight(done, table, self._tables)
        self._watcher.watch(done)
        return flight

    def close(self) -> None:
        self._watcher.close()
        self._tables.clear()
        self._driver.close()

    def _compile(self, device: torch.device) -> None:
        """Both forms of the kernel, now: later it would hold up a request, or fail it."""
        from triton.errors import TritonError

        scratch = self._torch.zeros(2 * WIDE_BYTES, dtype=self._torch.uint8, device=device)
        self._torch.cuda.current_stream(device).synchronize()
        try:
            for length in (WIDE_BYTES, 1):
                spans = np.array([(WIDE_BYTES, 0, length)], dtype=np.int64)
                self.launch(Work([(spans, scratch.data_ptr(), scratch.data_ptr())])).wait()
        except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.close()
            raise BackendUnavailable(f"cuda_ipc: Triton does not work here: {error}") from error


class CudaFlight:
    """One launch on a GPU; see `Flight`. Its table goes back to the free ones when it has landed."""

    def __init__(self, done: torch.cuda.Event, table: _Table, free: deque[_Table]) -> None:
        self._done = done
        self._table: _Table | None = table
        self._free = free

    def landed(self) -> bool:
        # The host has seen the event, so whatever is launched from now on, an attention kernel above all,
        # sees the bytes: nothing on the GPU needs to wait for this stream.
        if not self._done.query():  # type: ignore[no-untyped-call]
            return False
        self._free_table()
        return True

    def wait(self) -> None:
        self._done.synchronize()
        self._free_table()

    def _free_table(self) -> None:
        if self._table is not None:
            self._free.append(self._table)
            self._table = None


class _Table:
    """Room for one launch's table: pinned, so that its upload does not wait, and on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grow(_TABLE_ENTRIES)

    def room(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """At least `size` entries to be written."""
        if size > len(self._host):
            self._grow(1 << size.bit_length())
        return self._view

    def upload(self, size: int) -> torch.Tensor:
        """What was written, on the device by the time that the current stream gets there."""
        self._there[:size].copy_(self._host[:size], non_blocking=True)
        return self._there

    def _grow(self, entries: int) -> None:
        import torch

        self._host = torch.empty(entries, dtype=torch.int64, pin_memory=True)
        self._there = torch.empty(entries, dtype=torch.int64, device=self._device)
        self._view = self._host.numpy()


class _Watcher:
    """A thread that waits for one event after the other, so that the transfer thread can sleep meanwhile."""

    def __init__(self, driver: Driver, on_landed: Callable[[], None]) -> None:
        self._driver = driver
        self._on_landed = on_landed
        self._events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cuda-ipc-watcher", daemon=True)
        self._thread.start()

    def watch(self, event: torch.cuda.Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        self._driver.relax_capture()
        while (event := self._events.get()) is not None:
            try:
                event.synchronize()
            finally:
                self._on_landed()  # who asks then sees the same error
