# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank's KV pool, and its bytes for backends that move them through host memory.

A pool in host memory is read and written in place. One on a GPU is copied through pinned host buffers, on a
stream of its own; every copy is complete when the call returns.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvferry.transfer.layout import SpanTable

if TYPE_CHECKING:
    import torch


def allocate_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A contiguous pool of zeros, touched, so that memory does not grow later.

    In host memory it is of huge pages where the system grants them on request: a backend that reads another
    process's memory page by page, as NIXL does within a host, is more than twice as fast with them.
    """
    import torch

    pool = torch.empty(tuple(shape), dtype=dtype, device=device)
    if pool.device.type == "cpu":
        _ask_for_huge_pages(pool.data_ptr(), pool.numel() * pool.element_size())
    return pool.zero_()


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Advice to the kernel on the whole pages of a range, before they are touched. It may be refused."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(first, end - first, mmap.MADV_HUGEPAGE)


class PoolMemory(Protocol):
    """Scatter and gather access to one pool."""

    nbytes: int

    def readable(self, offsets: list[tuple[int, int]]) -> list[memoryview]:
        """The bytes of these (offset, length) pieces, in order; valid until the pool changes."""

    def writable(self, spans: SpanTable) -> list[memoryview]:
        """Buffers to be filled with the spans' bytes, in order."""

    def commit(self, spans: SpanTable, buffers: list[memoryview]) -> None:
        """The buffers of `writable` are full: the pool holds the bytes when this returns."""


def pool_memory(pool: torch.Tensor) -> PoolMemory:
    """Access to a contiguous pool. Raises ValueError for one that is not."""
    if not pool.is_contiguous():
        raise ValueError("a KV pool must be contiguous")
    return HostMemory(pool) if pool.device.type == "cpu" else DeviceMemory(pool)


class HostMemory:
    """A pool in host memory. The caller keeps the tensor alive."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.nbytes = pool.numel() * pool.element_size()
        self._bytes = memoryview((ctypes.c_char * self.nbytes).from_address(pool.data_ptr())).cast("B")

    def readable(self, offsets: list[tuple[int, int]]) -> list[memoryview]:
        return [self._bytes[offset : offset + length] for offset, length in offsets]

    def writable(self, spans: SpanTable) -> list[memoryview]:
        return [self._bytes[local : local + length] for local, _, length in spans.tolist()]

    def commit(self, spans: SpanTable, buffers: list[memoryview]) -> None:
        """Nothing to do: the buffers are the pool."""


class DeviceMemory:
    """A pool on a GPU."""

    def __init__(self, pool: torch.Tensor) -> None:
        import torch

        self.nbytes = pool.numel() * pool.element_size()
        self._pool = pool.view(-1).view(torch.uint8)
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def readable(self, offsets: list[tuple[int, int]]) -> list[memoryview]:
        import torch

        host = self._host_buffer(sum(length for _, length in offsets))
        with torch.cuda.stream(self._stream):
            at = 0
            for offset, length in offsets:
                host[at : at + length].copy_(self._pool[offset : offset + length], non_blocking=True)
                at += length
        self._stream.synchronize()
        return [_view(host)]

    def writable(self, spans: SpanTable) -> list[memoryview]:
        return [_view(self._host_buffer(int(spans[:, 2].sum())))]

    def commit(self, spans: SpanTable, buffers: list[memoryview]) -> None:
        import torch

        host = torch.frombuffer(buffers[0], dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            at = 0
            for local, _, length in spans.tolist():
                self._pool[local : local + length].copy_(host[at : at + length], non_blocking=True)
                at += length
        self._stream.synchronize()

    def _host_buffer(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _view(host: torch.Tensor) -> memoryview:
    """A host tensor's bytes; the view keeps them alive."""
    return host.numpy().data
