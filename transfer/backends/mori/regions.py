# SPDX-License-Identifier: Apache-2.0
"""A pool in regions that a NIC accepts, and the spans of a read by pairs of regions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvferry.transfer.backends.mori.library import MoriLibrary
from kvferry.transfer.engine import BackendUnavailable, PeerUnreachable
from kvferry.transfer.layout import SpanTable

if TYPE_CHECKING:
    import torch


SCRATCH_BYTES = 64
"""Memory beside the pool into which the first reads of a peer go."""


class MoriPoolAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of `nbytes`, in regions of `region_bytes` (the last may be shorter), as MORI describes them."""

    nbytes: int
    region_bytes: int
    regions: tuple[bytes, ...]


class MoriRegion:
    """A pool that peers may read. `memory` holds the library's description of each region.

    Raises `BackendUnavailable` for memory that the library refuses.

    Attributes:
        scratch: A little memory of the same kind that holds nothing.
    """

    def __init__(self, pool: torch.Tensor, library: MoriLibrary) -> None:
        on_host = pool.device.type == "cpu"
        device = -1 if on_host else pool.get_device()
        kind = library.module.MemoryLocationType.CPU if on_host else library.module.MemoryLocationType.GPU
        self.nbytes = pool.numel() * pool.element_size()
        self.region_bytes = region_bytes(pool.stride(0) * pool.element_size(), library.settings.region_bytes)
        pieces = [
            (pool.data_ptr() + start, min(self.region_bytes, self.nbytes - start))
            for start in range(0, self.nbytes, self.region_bytes)
        ]
        self._scratch = pool.new_empty(SCRATCH_BYTES)
        pieces.append((self._scratch.data_ptr(), SCRATCH_BYTES))
        try:
            *self.memory, self.scratch = [
                library.engine.register_memory(*piece, device, kind) for piece in pieces
            ]
        except RuntimeError as error:
            raise BackendUnavailable(f"mori: {error}") from error

    def describe(self) -> bytes:
        packed = tuple(each.pack() for each in self.memory)
        return msgspec.msgpack.encode(
            MoriPoolAddress(nbytes=self.nbytes, region_bytes=self.region_bytes, regions=packed)
        )


class RemotePool:
    """A peer's engine and pool, unpacked. Raises `PeerUnreachable` for an invalid description."""

    def __init__(self, module: Any, engine: bytes, pool: MoriPoolAddress) -> None:
        if pool.region_bytes < 1 or len(pool.regions) != -(-pool.nbytes // pool.region_bytes):
            raise PeerUnreachable("mori: the peer's pool is described inconsistently")
        try:
            self.engine = module.EngineDesc.unpack(engine)
            self.memory = [module.MemoryDesc.unpack(each) for each in pool.regions]
        except (RuntimeError, ValueError, TypeError) as error:
            raise PeerUnreachable(f"mori: {error}") from error
        self.pool = pool
        self.key: str = self.engine.key


def region_bytes(block_bytes: int, limit: int) -> int:
    """The longest whole number of blocks within the limit. Raises ValueError if not even one fits."""
    if block_bytes > limit:
        raise ValueError(f"mori: a block of {block_bytes} bytes is longer than a region of {limit}")
    return limit // block_bytes * block_bytes


def by_regions(
    spans: SpanTable, local_region: int, remote_region: int
) -> Iterator[tuple[int, int, SpanTable]]:
    """Cut spans where a region ends on either side, and group them by (local region, remote region).

    Offsets in the resulting tables count from the start of those regions.
    """
    rows = _cut(_cut(spans, 0, local_region), 1, remote_region)
    ours, theirs = rows[:, 0] // local_region, rows[:, 1] // remote_region
    rows = rows - np.column_stack([ours * local_region, theirs * remote_region, np.zeros_like(ours)])
    for local, remote in np.unique(np.column_stack([ours, theirs]), axis=0).tolist():
        yield local, remote, rows[(ours == local) & (theirs == remote)]


def _cut(rows: SpanTable, column: int, every: int) -> SpanTable:
    """Split rows so that none crosses a multiple of `every` in that column."""
    first = rows[:, column] // every
    counts = (rows[:, column] + rows[:, 2] - 1) // every - first + 1
    if (counts <= 1).all():
        return rows
    cut = np.repeat(rows, counts, axis=0)
    which = np.arange(len(cut)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begins = np.maximum(cut[:, column], which * every)
    ends = np.minimum(cut[:, column] + cut[:, 2], (which + 1) * every)
    cut[:, :2] += (begins - cut[:, column])[:, None]
    cut[:, 2] = ends - begins
    return cut
