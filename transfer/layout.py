# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV, which heads each rank holds, and spans of bytes.

Our own agent's pool is one tensor `[block, kv_head, layer, K|V, token, head_dim]`, so one block's slice for
any run of heads is one contiguous span, whatever the TP sizes on either side. Where KV lies in a rank's
memory, in this or in another engine's order, is its `Placement`. Engines order a pool's dimensions
differently: vLLM has seven orders and up to one allocation per layer. What a transfer needs is the same for
all: the KV of one block, head, layer and plane (K or V, or both where they alternate by token) is a run of
bytes, and strides lead from run to run. They are read off the tensors, so that no table of engines and
versions is needed.

A placement's offsets are *virtual*: a rank's memory regions are numbered in the order of their addresses, and
region i begins at `i << REGION_SHIFT`. So runs of different regions never touch, and are never merged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.common.hashing import Purpose, digest

if TYPE_CHECKING:
    import torch

DType = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_Text = Annotated[str, Meta(max_length=4096)]
"""Peers send it."""

SpanTable = npt.NDArray[np.int64]
"""Shape [n, 3]; columns are local offset, remote offset and length: virtual offsets into each pool, in bytes.
No span leads from one region into another."""

Offsets = npt.NDArray[np.int64]
"""Shape [n]."""

REGION_SHIFT = 44
"""Regions of up to 16 TiB, and 2¹⁹ of them in 63 bits."""
OFFSET_MASK = (1 << REGION_SHIFT) - 1
MAX_REGIONS = 512


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of one token's KV over all TP ranks. Two agents can exchange KV only if all of it is equal.

    With `mla` a block holds one latent vector per layer and token (`head_dim` wide), the same on every rank.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int
    rope: _Text
    order: _Text = "block,head,layer,kv,token,dim"
    mla: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def fingerprint(self) -> str:
        """16 hex digits over every field; TP size is not one of them."""
        return digest(Purpose.LAYOUT, msgspec.json.encode(self), size=8).hex()

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def head_block_bytes(self) -> int:
        """Bytes of one head's share of one block (with MLA: of the whole block)."""
        planes = 1 if self.mla else 2
        return self.num_layers * planes * self.block_size * self.head_dim * self.item_bytes

    def pool_shape(self, num_blocks: int, num_heads: int) -> tuple[int, int, int, int, int, int]:
        """Shape of a rank's pool that holds `num_heads` of the heads."""
        planes = 1 if self.mla else 2
        return (num_blocks, num_heads, self.num_layers, planes, self.block_size, self.head_dim)

    def local_heads(self, tp_size: int, rank: int) -> range:
        """The KV heads that one rank holds, by their number over all ranks.

        Heads are split evenly; with more ranks than heads, each head is held by several ranks in a row.
        An MLA latent counts as one head that every rank holds. Raises ValueError if the split does not
        come out even.
        """
        if not 0 <= rank < tp_size:
            raise ValueError(f"rank {rank} is outside a group of {tp_size}")
        if self.mla:
            return range(1)
        return split_heads(self.num_kv_heads, tp_size, rank)


def split_heads(num_kv_heads: int, tp_size: int, rank: int) -> range:
    """The KV heads of a rank, by their number over all ranks: split evenly, or each held by several ranks.

    Raises ValueError if that does not come out even.
    """
    if num_kv_heads % tp_size == 0:
        share = num_kv_heads // tp_size
        return range(rank * share, (rank + 1) * share)
    if tp_size % num_kv_heads == 0:
        head = rank // (tp_size // num_kv_heads)
        return range(head, head + 1)
    raise ValueError(f"{num_kv_heads} KV heads cannot be split over {tp_size} ranks")


def differences(ours: KVGeometry, theirs: KVGeometry) -> list[tuple[str, str, str]]:
    """The fields in which two geometries differ, as (field, ours, theirs)."""
    return [
        (name, str(getattr(ours, name)), str(getattr(theirs, name)))
        for name in KVGeometry.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]


def merge_spans(table: SpanTable) -> SpanTable:
    """Join neighbouring rows that are adjacent both locally and remotely."""
    if len(table) < 2:
        return table
    local, remote, length = table.T
    apart = local[:-1] + length[:-1] != local[1:]
    if apart.all():
        return table
    apart |= remote[:-1] + length[:-1] != remote[1:]
    starts = np.flatnonzero(np.r_[True, apart])
    merged = table[starts]
    merged[:, 2] = np.add.reduceat(table[:, 2], starts)
    return merged


def check_bounds(spans: SpanTable, local: Sequence[int], remote: Sequence[int]) -> None:
    """Raise ValueError for a span outside either pool, where a backend might read or write anything.

    It runs once per read, hence column by column: reducing along the rows takes three times as long.

    Args:
        local, remote: The sizes of each pool's regions, in bytes.
    """
    if not len(spans):
        return
    length = spans[:, 2]
    if spans.min() < 0 or not _within(spans[:, 1], length, remote):
        raise ValueError("a span lies outside the peer's pool")
    if not _within(spans[:, 0], length, local):
        raise ValueError("a span lies outside the pool")


def _within(offsets: Offsets, lengths: Offsets, sizes: Sequence[int]) -> bool:
    if len(sizes) == 1:
        return bool((offsets + lengths).max() <= sizes[0])
    regions = offsets >> REGION_SHIFT
    if regions.max() >= len(sizes):
        return False
    ends = (offsets & OFFSET_MASK) + lengths
    return bool((ends <= np.asarray(sizes, dtype=np.int64)[regions]).all())


def addresses(offsets: Offsets, bases: Sequence[int]) -> Offsets:
    """Addresses of virtual offsets into a pool whose regions begin at `bases`."""
    if len(bases) == 1:
        return offsets + bases[0]
    begins: Offsets = np.asarray(bases, dtype=np.int64)[offsets >> REGION_SHIFT]
    return begins + (offsets & OFFSET_MASK)


def num_columns(geometry: KVGeometry, tp_size: int) -> int:
    """Heads over all ranks, in order of rank; one that several ranks hold counts once for each."""
    return sum(len(geometry.local_heads(tp_size, rank)) for rank in range(tp_size))


def source_columns(geometry: KVGeometry, *, tp_size: int, remote_tp_size: int) -> list[int]:
    """Where each of the consumer's columns (`num_columns`) comes from: the producer's column by its number.

    That is, of each head, the producer rank's that the consumer's rank reads it from (`sources`).
    """
    starts, total = [], 0
    for remote_rank in range(remote_tp_size):
        starts.append(total)
        total += len(geometry.local_heads(remote_tp_size, remote_rank))
    columns: list[int] = []
    for rank in range(tp_size):
        mine = geometry.local_heads(tp_size, rank)
        column_of = {
            head: starts[remote_rank] + head - geometry.local_heads(remote_tp_size, remote_rank).start
            for remote_rank, heads in sources(geometry, tp_size, rank, remote_tp_size)
            for head in heads
        }
        columns += [column_of[head] for head in mine]
    return columns


def sources(
    geometry: KVGeometry, tp_size: int, rank: int, remote_tp_size: int
) -> tuple[tuple[int, range], ...]:
    """Which run of a rank's heads comes from which producer rank; each head from exactly one.

    Where several producer ranks hold the same heads, readers spread over them. Raises ValueError when a TP
    size does not divide the heads.
    """
    mine = geometry.local_heads(tp_size, rank)
    holders: dict[range, list[int]] = {}
    for remote_rank in range(remote_tp_size):
        theirs = geometry.local_heads(remote_tp_size, remote_rank)
        shared = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
        if shared:
            holders.setdefault(shared, []).append(remote_rank)
    return tuple((ranks[rank % len(ranks)], heads) for heads, ranks in holders.items())


MAX_LAYERS = 4096
MAX_TEMPLATE_ROWS = 1 << 16

BlockPairs = npt.NDArray[np.int64]
"""Shape [n, 3]; columns are the local block, the remote block, and 0."""

_Bytes = Annotated[int, Meta(ge=0, le=1 << REGION_SHIFT)]
_Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One rank's KV. The run of block b, head h (counted from 0), layer l and plane p begins at
    `layers[l] + b * block_stride + h * head_stride + p * plane_stride` and has `unit_bytes` bytes.

    `heads_start` is the number of its first head over all ranks. Peers send it: `msgspec.ValidationError` is
    raised for one that leads outside its own regions.
    """

    regions: Annotated[tuple[_Bytes, ...], Meta(min_length=1, max_length=MAX_REGIONS)]
    """Their sizes."""
    layers: Annotated[tuple[_Offset, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    num_blocks: _Count
    block_stride: _Bytes
    num_heads: _Count
    heads_start: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    head_stride: _Bytes
    planes: Annotated[int, Meta(ge=1, le=2)]
    plane_stride: _Bytes
    unit_bytes: Annotated[int, Meta(ge=1, le=1 << REGION_SHIFT)]

    def __post_init__(self) -> None:
        reach = (
            (self.num_blocks - 1) * self.block_stride
            + (self.num_heads - 1) * self.head_stride
            + (self.planes - 1) * self.plane_stride
            + self.unit_bytes
        )
        for layer in self.layers:
            region, offset = layer >> REGION_SHIFT, layer & OFFSET_MASK
            if region >= len(self.regions) or offset + reach > self.regions[region]:
                raise ValueError(f"a layer at {offset} of region {region} leads outside of it")
        if len(self.layers) * self.planes * self.num_heads > MAX_TEMPLATE_ROWS:
            raise ValueError(f"a block of more than {MAX_TEMPLATE_ROWS} runs")

    @property
    def heads(self) -> range:
        """By their number over all ranks."""
        return range(self.heads_start, self.heads_start + self.num_heads)

    @cached_property
    def runs(self) -> npt.NDArray[np.int64]:
        """Virtual offsets of block 0, `[layer, plane, head]`."""
        layers = np.asarray(self.layers, dtype=np.int64)[:, None, None]
        planes = np.arange(self.planes, dtype=np.int64)[None, :, None] * self.plane_stride
        heads = np.arange(self.num_heads, dtype=np.int64)[None, None, :] * self.head_stride
        return layers + planes + heads

    @cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """Block 0's first head, as (offset, length) pieces in order of layer and plane; those that touch are
        joined. Other blocks and heads lie likewise, their strides further on.
        """
        pieces: list[tuple[int, int]] = []
        for offset in self.runs[:, :, 0].ravel().tolist():
            if pieces and sum(pieces[-1]) == offset:
                pieces[-1] = pieces[-1][0], pieces[-1][1] + self.unit_bytes
            else:
                pieces.append((offset, self.unit_bytes))
        return pieces


def pair_blocks(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> BlockPairs:
    """`remote_blocks[i]` goes to `local_blocks[i]`. Raises ValueError when the lists differ in length."""
    if len(local_blocks) != len(remote_blocks):
        raise ValueError(f"{len(local_blocks)} local blocks for {len(remote_blocks)} remote ones")
    pairs = np.zeros((len(local_blocks), 3), dtype=np.int64)
    pairs[:, 0], pairs[:, 1] = local_blocks, remote_blocks
    return pairs


class BlockTemplate:
    """The bytes of one block that a consumer's rank reads from a producer's, made once for a pair of ranks.

    Raises ValueError if the two differ in what a run is: they hold different content.
    """

    def __init__(self, local: Placement, remote: Placement, heads: range) -> None:
        for name in ("planes", "unit_bytes"):
            ours, theirs = getattr(local, name), getattr(remote, name)
            if ours != theirs:
                raise ValueError(f"{name}: theirs {theirs}, ours {ours}")
        if len(local.layers) != len(remote.layers):
            raise ValueError(f"layers: theirs {len(remote.layers)}, ours {len(local.layers)}")
        for each in (local, remote):
            if heads.start < each.heads.start or heads.stop > each.heads.stop:
                raise ValueError(f"heads {heads} are not among {each.heads}")
        ours = local.runs[:, :, heads.start - local.heads_start : heads.stop - local.heads_start]
        theirs = remote.runs[:, :, heads.start - remote.heads_start : heads.stop - remote.heads_start]
        rows = np.empty((ours.size, 3), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = ours.ravel(), theirs.ravel(), local.unit_bytes
        self._rows = merge_spans(rows[np.argsort(rows[:, 0], kind="stable")])
        self._strides = np.array([local.block_stride, remote.block_stride, 0], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """Spans of one block."""
        return len(self._rows)

    def spans(self, blocks: BlockPairs) -> SpanTable:
        """The spans of several blocks; those that touch on both sides are merged."""
        # By row of the template first: blocks in a row touch there, if anything does.
        table = self._rows[:, None, :] + (blocks * self._strides)[None, :, :]
        return merge_spans(table.reshape(-1, 3))


def placement_of(layers: Sequence[torch.Tensor], *, planes: int, heads: range) -> Placement:
    """Describe one rank's KV by one tensor per layer; those that share memory count once.

    Args:
        layers: `[block, head, *run]`, or `[block, plane, head, *run]` with two planes, as views of whatever
            strides; all of equal shape and strides.
        heads: Which these are, by their number over all ranks.

    Raises ValueError if a run is not contiguous, or layers differ.
    """
    first = layers[0]
    item = first.element_size()
    for layer in layers:
        if (layer.shape, layer.stride(), layer.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError("layers of different shapes cannot be transferred together")
    shape, strides = list(first.shape), [stride * item for stride in first.stride()]
    plane_stride = 0
    if planes == 2:
        plane_stride = strides.pop(1)
        shape.pop(1)
    elif planes != 1:
        raise ValueError(f"planes must be 1 or 2, got {planes}")
    unit = item
    for size, stride in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if size > 1 and stride != unit:
            raise ValueError(f"the KV of a block and head is not contiguous: strides {first.stride()}")
        unit *= size
    if shape[1] != len(heads):
        raise ValueError(f"{shape[1]} heads in the tensors, {len(heads)} expected")
    storages = {layer.untyped_storage().data_ptr(): layer.untyped_storage().nbytes() for layer in layers}
    bases = sorted(storages)
    offsets = dict.fromkeys(_virtual(layer.data_ptr(), bases) for layer in layers)
    return Placement(
        regions=tuple(storages[base] for base in bases),
        layers=tuple(offsets),
        num_blocks=shape[0],
        block_stride=strides[0],
        num_heads=len(heads),
        heads_start=heads.start,
        head_stride=strides[1],
        planes=planes,
        plane_stride=plane_stride,
        unit_bytes=unit,
    )


def plan_templates(
    geometry: KVGeometry, locals_: Sequence[Placement], remotes: Sequence[Placement]
) -> list[dict[int, BlockTemplate]]:
    """What each of our ranks reads from which producer rank; both in order of rank.

    Raises ValueError if a rank holds other heads than it should, or the two sides hold different content.
    """
    for rank, remote in enumerate(remotes):
        if remote.heads != (expected := geometry.local_heads(len(remotes), rank)):
            raise ValueError(f"rank {rank} has heads {remote.heads}, not {expected}")
    return [
        {
            remote_rank: BlockTemplate(local, remotes[remote_rank], heads)
            for remote_rank, heads in sources(geometry, len(locals_), rank, len(remotes))
        }
        for rank, local in enumerate(locals_)
    ]


def _virtual(address: int, bases: Sequence[int]) -> int:
    region = bisect_right(bases, address) - 1
    return (region << REGION_SHIFT) + address - bases[region]
