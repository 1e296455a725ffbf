# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank's KV pool, and its bytes for backends that move them through host memory.

A pool in host memory is read and written in place. One on a GPU is copied through pinned host buffers, on a
stream of its own; every copy is complete when the call returns.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvferry.transfer.layout import (
    OFFSET_MASK,
    REGION_SHIFT,
    KVGeometry,
    LayerView,
    Placement,
    SpanTable,
    placement_of,
)

if TYPE_CHECKING:
    import torch


def device_name(device: torch.device) -> str:
    """Return "cpu", or what the GPU is called."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


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


@dataclass(frozen=True, slots=True)
class KVPool:
    """One rank's KV: the memory that backends register, and where in it each run of KV lies.

    `regions` are contiguous, in order of address.
    """

    regions: tuple[torch.Tensor, ...]
    placement: Placement


def own_pool(pool: torch.Tensor, geometry: KVGeometry, tp_size: int, rank: int) -> KVPool:
    """Our own agent's pool: contiguous, of `geometry.pool_shape`. Raises ValueError for another shape."""
    heads = geometry.local_heads(tp_size, rank)
    if tuple(pool.shape) != geometry.pool_shape(pool.shape[0], len(heads)):
        raise ValueError(f"pool of shape {tuple(pool.shape)} does not fit {geometry} with heads {heads}")
    # Per layer: block, K|V, head, token, dim.
    tensors = [pool[:, :, layer].transpose(1, 2) for layer in range(geometry.num_layers)]
    if geometry.mla:
        tensors = [tensor[:, 0] for tensor in tensors]
    total_heads = 1 if geometry.mla else geometry.num_kv_heads
    planes = 1 if geometry.mla else 2
    layers = [
        LayerView(number.to_bytes(2, "big"), tensor, planes, heads, total_heads)
        for number, tensor in enumerate(tensors)
    ]
    return KVPool((pool,), placement_of([layers], pool.shape[0]))


def pool_of_layers(groups: Sequence[Sequence[LayerView]], num_blocks: int) -> KVPool:
    """Another engine's pool, by its views of each layer, group by group (`layout.placement_of`).

    Each allocation that holds some of it is a region. Raises ValueError if a run of KV is not contiguous.
    """
    import torch

    placement = placement_of(groups, num_blocks)
    tensors = [view.tensor for group in groups for view in group]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    regions = (
        torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storages[base])
        for base in sorted(storages)
    )
    return KVPool(tuple(regions), placement)


class PoolMemory(Protocol):
    """Scatter and gather access to one pool, by virtual offsets. `sizes` are those of its regions."""

    sizes: tuple[int, ...]

    def readable(self, offsets: list[tuple[int, int]]) -> list[memoryview]:
        """The bytes of these (offset, length) pieces, in order; valid until the pool changes."""

    def writable(self, spans: SpanTable) -> list[memoryview]:
        """Buffers to be filled with the spans' bytes, in order."""

    def commit(self, spans: SpanTable, buffers: list[memoryview]) -> None:
        """The buffers of `writable` are full: the pool holds the bytes when this returns."""


def pool_memory(regions: Sequence[torch.Tensor]) -> PoolMemory:
    """Access to a pool. Raises ValueError for a region that is not contiguous."""
    if not all(region.is_contiguous() for region in regions):
        raise ValueError("a KV pool's regions must be contiguous")
    return HostMemory(regions) if regions[0].device.type == "cpu" else DeviceMemory(regions)


def region_sizes(regions: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Their sizes in bytes."""
    return tuple(region.numel() * region.element_size() for region in regions)


def are_inside(pieces: Sequence[tuple[int, int]], sizes: Sequence[int]) -> bool:
    """Whether (virtual offset, length) pieces that a peer asks for lie in regions of these sizes, and are no
    more than the regions hold.
    """
    total = 0
    for offset, length in pieces:
        region = offset >> REGION_SHIFT
        if region >= len(sizes) or (offset & OFFSET_MASK) + length > sizes[region]:
            return False
        total += length
    return total <= sum(sizes)


class HostMemory:
    """A pool in host memory. The caller keeps the tensors alive."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        self.sizes = region_sizes(regions)
        self._regions = [
            memoryview((ctypes.c_char * size).from_address(region.data_ptr())).cast("B")
            for region, size in zip(regions, self.sizes, strict=True)
        ]

    def readable(self, offsets: list[tuple[int, int]]) -> list[memoryview]:
        return [self._bytes(offset, length) for offset, length in offsets]

    def writable(self, spans: SpanTable) -> list[memoryview]:
        return [self._bytes(local, length) for local, _, length in spans.tolist()]

    def _bytes(self, offset: int, length: int) -> memoryview:
        start = offset & OFFSET_MASK
        return self._regions[offset >> REGION_SHIFT][start : start + length]

    def commit(self, spans: SpanTable, buffers: list[memoryview]) -> None:
        """Nothing to do: the buffers are the pool."""


class DeviceMemory:
    """A pool on a GPU."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        import torch

        self.sizes = region_sizes(regions)
        self._regions = [region.view(-1).view(torch.uint8) for region in regions]
        self._stream = torch.cuda.Stream(regions[0].device)  # type: ignore[no-untyped-call]

    def readable(self, offsets: list[tuple[int, int]]) -> list[memoryview]:
        import torch

        host = self._host_buffer(sum(length for _, length in offsets))
        with torch.cuda.stream(self._stream):
            at = 0
            for offset, length in offsets:
                host[at : at + length].copy_(self._bytes(offset, length), non_blocking=True)
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
                self._bytes(local, length).copy_(host[at : at + length], non_blocking=True)
                at += length
        self._stream.synchronize()

    def _bytes(self, offset: int, length: int) -> torch.Tensor:
        start = offset & OFFSET_MASK
        return self._regions[offset >> REGION_SHIFT][start : start + length]

    def _host_buffer(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _view(host: torch.Tensor) -> memoryview:
    """A host tensor's bytes; the view keeps them alive."""
    return host.numpy().data
