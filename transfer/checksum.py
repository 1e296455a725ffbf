# SPDX-License-Identifier: Apache-2.0
"""Checksums of KV blocks, one per block and KV head of layers that lie alike (`--verify-kv`).

The sum of a slice's little-endian words w is (Σ kᵢ·wᵢ mod 2⁶⁴) >> 32 over fixed 64-bit keys k: multilinear
hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, §3). Bytes that differ by
accident pass with a chance of about 2⁻³². It is no CRC because it has to be the same, and fast, on CPUs and
on GPUs. It proves nothing against a peer that lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.transfer.layout import OFFSET_MASK, REGION_SHIFT, Layers
from kvferry.transfer.memory import KVPool

if TYPE_CHECKING:
    import torch

SUM_BYTES = 4
SumTable = npt.NDArray[np.uint32]
"""Shape [blocks, heads]."""


class PoolSums:
    """Sums of one rank's pool. Raises ValueError for KV that does not lie at whole words."""

    def __init__(self, pool: KVPool) -> None:
        self._groups = [[LayerSums(pool, layers) for layers in group] for group in pool.placement.groups]

    def block_bytes(self, group: int) -> int:
        """How much of a block of this group the rank has; 0 if it has none of its layers."""
        return sum(each.block_bytes for each in self._groups[group])

    def sums(self, group: int, blocks: Sequence[int]) -> SumTable:
        """The sums of some blocks of a group, row by row. What they hold must not change meanwhile."""
        none = np.empty((len(blocks), 0), dtype=np.uint32)
        return np.concatenate([none, *(each.sums(blocks) for each in self._groups[group] if blocks)], axis=1)

    def clear(self, group: int, blocks: Sequence[int]) -> None:
        """Write zeros over some blocks of a group."""
        for each in self._groups[group]:
            each.clear(blocks)


class LayerSums:
    """Sums of layers that lie alike in a rank's pool: one for each block and head, over all of the layers."""

    def __init__(self, pool: KVPool, layers: Layers) -> None:
        import torch

        regions = pool.regions
        # Runs that are not made of whole 32-bit words are rare.
        words = (torch.int32, torch.int16, torch.uint8)
        word = next(each for each in words if not layers.unit_bytes % each.itemsize)
        offsets = [offset & OFFSET_MASK for offset, _ in layers.pieces]
        if any(each % word.itemsize for each in (*offsets, layers.block_stride, layers.head_stride)):
            raise ValueError(f"runs of {layers.unit_bytes} bytes do not begin at whole words")
        strides = (layers.block_stride // word.itemsize, layers.head_stride // word.itemsize, 1)
        lengths = [length // word.itemsize for _, length in layers.pieces]
        keys = np.split(word_keys(sum(lengths)), np.cumsum(lengths)[:-1])
        shape = (pool.placement.num_blocks, layers.num_heads)
        self._parts = [
            (
                _words(regions[offset >> REGION_SHIFT], word).as_strided(
                    (*shape, length), strides, (offset & OFFSET_MASK) // word.itemsize
                ),
                torch.from_numpy(part).to(regions[0].device),
            )
            for (offset, _), length, part in zip(layers.pieces, lengths, keys, strict=True)
        ]
        """Words [block, head, n] and their keys, piece by piece of what one head has in a block."""
        self._stream = torch.cuda.Stream(regions[0].device) if regions[0].is_cuda else None  # type: ignore[no-untyped-call]
        self.block_bytes = layers.num_heads * sum(lengths) * word.itemsize

    def sums(self, blocks: Sequence[int]) -> SumTable:
        """The sums of at least one block, row by row."""
        return self._sums_on_host(blocks) if self._stream is None else self._sums_on_device(blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """Write zeros over some blocks. They are there when this returns."""
        import torch

        with torch.cuda.stream(self._stream):
            for words, _ in self._parts:
                words[list(blocks)] = 0
        if self._stream is not None:
            self._stream.synchronize()

    def _sums_on_host(self, blocks: Sequence[int]) -> SumTable:
        parts = [(words.numpy(), keys.numpy()) for words, keys in self._parts]
        rows = []
        for block in blocks:
            row = [np.einsum("hw,w->h", words[block].astype(np.int64), keys) for words, keys in parts]
            rows.append(np.sum(row, axis=0))
        return _folded(np.stack(rows))

    def _sums_on_device(self, blocks: Sequence[int]) -> SumTable:
        import torch

        with torch.cuda.stream(self._stream):
            parts = torch.stack([totals(words, keys, blocks) for words, keys in self._parts])
            return _folded(parts.sum(dim=0).cpu().numpy())


def _words(region: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """A region as words, but for a rest at its end."""
    import torch

    found = region.view(-1).view(torch.uint8)
    return found[: len(found) // word.itemsize * word.itemsize].view(word)


def totals(words: torch.Tensor, keys: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """The sums before their shift, [blocks, heads], where the words are. Block by block: it takes 8 bytes of
    scratch memory per word.
    """
    import torch

    return torch.stack([(words[each].long() * keys).sum(dim=1) for each in blocks])


def word_keys(count: int) -> npt.NDArray[np.int64]:
    """The first keys: SplitMix64's output for the seed 0 (Steele, Lea and Flood, OOPSLA 2014)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))).view(np.int64)


def pack_sums(table: SumTable) -> bytes:
    return table.astype("<u4").tobytes()


def unpack_sums(packed: bytes, num_blocks: int) -> SumTable:
    """Raises ValueError if the bytes are not whole rows of this many blocks."""
    flat: npt.NDArray[Any] = np.frombuffer(packed, dtype="<u4")
    return flat.astype(np.uint32).reshape(num_blocks, -1 if num_blocks else 0)


def row_widths(
    columns: Sequence[int], counts: Sequence[int], first_block: int, num_blocks: int
) -> Iterator[int]:
    """Yield how many columns the rows of some blocks have, which a producer sent from `first_block` on.

    Args:
        columns: Of a row, by group.
        counts: Blocks of the prompt, by group; none if there is but one group. They are the producer's, and
            may be any: no more rows are yielded than it sent blocks.
    """
    at, end = 0, first_block + num_blocks
    for width, count in zip(columns, counts or (end,), strict=False):
        yield from repeat(width, max(0, min(at + count, end) - max(at, first_block)))
        at += count


def split_rows(packed: bytes, columns: Iterable[int]) -> tuple[bytes, ...]:
    """Cut a producer's checksums into a row per block, of so many columns each; no rows if that leaves a rest
    or takes more.
    """
    rows, at = [], 0
    for each in columns:
        rows.append(packed[at : at + each * SUM_BYTES])
        at += each * SUM_BYTES
    return tuple(rows) if at == len(packed) else ()


def first_mismatch(
    ours: SumTable, theirs: Sequence[bytes], local_blocks: Sequence[int], columns: Sequence[int]
) -> str:
    """Describe where the blocks of a group that were read differ from the producer's checksums; empty if
    nowhere.

    Our column i must equal the producer's `columns[i]` (`layout.source_columns`).
    """
    if not ours.size:
        return ""
    table = unpack_sums(b"".join(theirs), len(theirs))
    differing = np.argwhere(ours != table[:, list(columns)])
    if not len(differing):
        return ""
    row, column = differing[0]
    return f"{len(differing)} of {ours.size} slices differ, first block {local_blocks[row]}, head {column}"


def _folded(totals: npt.NDArray[np.int64]) -> SumTable:
    return (totals.view(np.uint64) >> np.uint64(32)).astype(np.uint32)
