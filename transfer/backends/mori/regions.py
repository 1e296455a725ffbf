# SPDX-License-Identifier: Apache-2.0
"""A pool in pieces that a NIC accepts, and the spans of a read by pairs of pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvferry.transfer.backends.mori.library import MoriLibrary
from kvferry.transfer.engine import BackendUnavailable, PeerUnreachable
from kvferry.transfer.layout import OFFSET_MASK, REGION_SHIFT, Offsets, SpanTable
from kvferry.transfer.memory import region_sizes

if TYPE_CHECKING:
    import torch


SCRATCH_BYTES = 64
"""Memory beside the pool into which the first reads of a peer go."""


class MoriRegionAddress(
    msgspec.Struct, frozen=True, kw_only=True, rename={"piece_bytes": "region_bytes", "pieces": "regions"}
):
    """A region of `nbytes`, in pieces of `piece_bytes` (the last may be shorter), as MORI describes them."""

    nbytes: int
    piece_bytes: int
    pieces: tuple[bytes, ...]


class MoriRegion:
    """A region that peers may read."""

    def __init__(self, address: MoriRegionAddress) -> None:
        self._address = address

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._address)


class PieceMap:
    """Which piece each byte of a pool is in. Pieces are numbered through, region by region.

    Args:
        sizes: Of the regions, in bytes.
        piece_bytes: Of all pieces but the last of each region.
    """

    def __init__(self, sizes: Sequence[int], piece_bytes: int) -> None:
        self.sizes = tuple(sizes)
        self.piece_bytes = piece_bytes
        counts = [-(-size // piece_bytes) for size in sizes]
        self._first = np.cumsum([0, *counts], dtype=np.int64)[:-1]

    def locate(self, offsets: Offsets) -> tuple[Offsets, Offsets]:
        """The piece's number, and the offset into it, of virtual offsets into the pool."""
        inner = offsets & OFFSET_MASK
        numbers = self._first[offsets >> REGION_SHIFT] + inner // self.piece_bytes
        return numbers, inner % self.piece_bytes


class MoriPool:
    """Our pool, registered piece by piece; `memory` holds the library's description of each.

    Raises `BackendUnavailable` for memory that the library refuses.

    Attributes:
        scratch: A little memory of the same kind that holds nothing.
    """

    def __init__(self, pool: Sequence[torch.Tensor], library: MoriLibrary) -> None:
        block_bytes = max(region.stride(0) * region.element_size() for region in pool)
        self.map = PieceMap(region_sizes(pool), piece_bytes(block_bytes, library.settings.region_bytes))
        self._scratch = pool[0].new_empty(SCRATCH_BYTES)
        register = _registrar(pool[0], library)
        try:
            pieces = [
                [
                    register(region.data_ptr() + start, min(self.map.piece_bytes, size - start))
                    for start in range(0, size, self.map.piece_bytes)
                ]
                for region, size in zip(pool, self.map.sizes, strict=True)
            ]
            self.scratch = register(self._scratch.data_ptr(), SCRATCH_BYTES)
        except RuntimeError as error:
            raise BackendUnavailable(f"mori: {error}") from error
        self.memory = [piece for region in pieces for piece in region]
        self.regions = [
            MoriRegion(
                MoriRegionAddress(
                    nbytes=size,
                    piece_bytes=self.map.piece_bytes,
                    pieces=tuple(piece.pack() for piece in region),
                )
            )
            for size, region in zip(self.map.sizes, pieces, strict=True)
        ]


def _registrar(memory: torch.Tensor, library: MoriLibrary) -> Callable[[int, int], Any]:
    """Registers memory of the same device, by address and size."""
    on_host = memory.device.type == "cpu"
    device = -1 if on_host else memory.get_device()
    kinds = library.module.MemoryLocationType
    kind = kinds.CPU if on_host else kinds.GPU
    return lambda address, nbytes: library.engine.register_memory(address, nbytes, device, kind)


class RemotePool:
    """A peer's engine and pool, unpacked. Raises `PeerUnreachable` for an invalid description."""

    def __init__(self, module: Any, engine: bytes, pool: Sequence[MoriRegionAddress]) -> None:
        lengths = {region.piece_bytes for region in pool}
        if len(lengths) != 1 or min(lengths) < 1 or not all(_is_consistent(region) for region in pool):
            raise PeerUnreachable("mori: the peer's pool is described inconsistently")
        try:
            self.engine = module.EngineDesc.unpack(engine)
            self.memory = [module.MemoryDesc.unpack(each) for region in pool for each in region.pieces]
        except (RuntimeError, ValueError, TypeError) as error:
            raise PeerUnreachable(f"mori: {error}") from error
        self.map = PieceMap([region.nbytes for region in pool], lengths.pop())
        self.key: str = self.engine.key


def _is_consistent(region: MoriRegionAddress) -> bool:
    return len(region.pieces) == -(-region.nbytes // region.piece_bytes)


def piece_bytes(block_bytes: int, limit: int) -> int:
    """The longest whole number of blocks within the limit. Raises ValueError if not even one fits."""
    if block_bytes > limit:
        raise ValueError(f"mori: a block of {block_bytes} bytes is longer than a region of {limit}")
    return limit // block_bytes * block_bytes


def by_pieces(spans: SpanTable, ours: PieceMap, theirs: PieceMap) -> Iterator[tuple[int, int, SpanTable]]:
    """Cut spans where a piece ends on either side, and group them by (local piece, remote piece).

    Offsets in the resulting tables count from the start of those pieces.
    """
    rows = _cut(_cut(spans, 0, ours.piece_bytes), 1, theirs.piece_bytes)
    (local, local_offsets), (remote, remote_offsets) = ours.locate(rows[:, 0]), theirs.locate(rows[:, 1])
    rows = np.column_stack([local_offsets, remote_offsets, rows[:, 2]])
    for mine, peers in np.unique(np.column_stack([local, remote]), axis=0).tolist():
        yield mine, peers, rows[(local == mine) & (remote == peers)]


def _cut(rows: SpanTable, column: int, every: int) -> SpanTable:
    """Split rows so that none crosses a multiple of `every` in that column, from its region's start on."""
    inner = rows[:, column] & OFFSET_MASK
    first = inner // every
    counts = (inner + rows[:, 2] - 1) // every - first + 1
    if (counts <= 1).all():
        return rows
    cut, inner = np.repeat(rows, counts, axis=0), np.repeat(inner, counts)
    which = np.arange(len(cut)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    begins = np.maximum(inner, which * every)
    ends = np.minimum(inner + cut[:, 2], (which + 1) * every)
    cut[:, :2] += (begins - inner)[:, None]
    cut[:, 2] = ends - begins
    return cut
