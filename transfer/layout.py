# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV, which heads each rank holds, and spans of bytes.

Our own agent's pool is one tensor `[block, kv_head, layer, K|V, token, head_dim]`, so one block's slice for
any run of heads is one contiguous span, whatever the TP sizes on either side. Where KV lies in a rank's
memory, in this or in another engine's order, is its `Placement`. Engines order a pool's dimensions
differently: vLLM has seven orders and up to one allocation per layer. What a transfer needs is the same for
all: the KV of one block, head, layer and plane (K or V, or both where they alternate by token) is a run of
bytes, and strides lead from run to run. They are read off the tensors, so that no table of engines and
versions is needed.

A model whose layers keep different KV (all tokens, a window, a state) has several KV-cache *groups*, as vLLM
calls them: a block id stands for a block of one group's layers. Layers are paired by name, so that either
side may spread them over pipeline stages as it likes.

A placement's offsets are *virtual*: a rank's memory regions are numbered in the order of their addresses, and
region i begins at `i << REGION_SHIFT`. So runs of different regions never touch, and are never merged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.common.hashing import Purpose, digest

if TYPE_CHECKING:
    import torch

DType = Literal["float32", "bfloat16", "float16", "uint8"]
"""`uint8`: bytes of a quantized or another engine's own format."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

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


def spread(mine: range, held: Sequence[range], rank: int) -> tuple[tuple[int, range], ...]:
    """Which run of a rank's heads to read from which holder, by its number in `held`.

    Where several hold a head, the readers' ranks spread over them. Raises ValueError if none does.
    """
    runs: list[tuple[int, range]] = []
    for head in mine:
        holders = [number for number, heads in enumerate(held) if head in heads]
        if not holders:
            raise ValueError(f"no rank of theirs has head {head}")
        holder = holders[rank % len(holders)]
        if runs and runs[-1][0] == holder:
            runs[-1] = holder, range(runs[-1][1].start, head + 1)
        else:
            runs.append((holder, range(head, head + 1)))
    return tuple(runs)


MAX_LAYERS = 4096
MAX_GROUPS = 64
MAX_TEMPLATE_ROWS = 1 << 16

BlockPairs = npt.NDArray[np.int64]
"""Shape [n, 3]; columns are a local block, a remote block, and how many are meant, counted from these."""

_Bytes = Annotated[int, Meta(ge=0, le=1 << REGION_SHIFT)]
_Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]
_Name = Annotated[bytes, Meta(min_length=1, max_length=16)]


class Layers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Layers of one group whose KV lies alike in a rank's memory.

    The run of block b, head h (counted from 0) and plane p of layer `names[i]` begins at
    `offsets[i] + b * block_stride + h * head_stride + p * plane_stride` and has `unit_bytes` bytes.

    Attributes:
        names: The same on every rank and either side, such as hashes of an engine's names.
        heads_start: The number of the rank's first head among the `total_heads` of all ranks. What every
            rank holds alike counts as one head; what is each rank's own as a head of each.
    """

    names: Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    offsets: Annotated[tuple[_Offset, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    block_stride: _Bytes
    num_heads: _Count
    heads_start: Annotated[int, Meta(ge=0, le=1 << 31)]
    total_heads: _Count
    head_stride: _Bytes
    planes: Annotated[int, Meta(ge=1, le=MAX_TEMPLATE_ROWS)]
    plane_stride: _Bytes
    unit_bytes: Annotated[int, Meta(ge=1, le=1 << REGION_SHIFT)]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.offsets):
            raise ValueError(f"{len(self.names)} names of {len(self.offsets)} layers")
        if self.num_rows > MAX_TEMPLATE_ROWS:
            raise ValueError(f"a block of more than {MAX_TEMPLATE_ROWS} runs")

    @property
    def num_rows(self) -> int:
        """Runs of one block."""
        return len(self.names) * self.planes * self.num_heads

    @property
    def heads(self) -> range:
        """By their number over all ranks."""
        return range(self.heads_start, self.heads_start + self.num_heads)

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """Where in `offsets` a layer is, by name."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def runs(self) -> npt.NDArray[np.int64]:
        """Virtual offsets of block 0, `[layer, plane, head]`."""
        layers = np.asarray(self.offsets, dtype=np.int64)[:, None, None]
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

    def narrowed(self, heads: range) -> Iterator[Layers]:
        """Yield the layers with only those of the heads that they have, unless there are none."""
        start, stop = max(heads.start, self.heads.start), min(heads.stop, self.heads.stop)
        if start < stop:
            shift = (start - self.heads_start) * self.head_stride
            offsets = tuple(offset + shift for offset in self.offsets)
            yield msgspec.structs.replace(self, offsets=offsets, heads_start=start, num_heads=stop - start)

    def reach(self, num_blocks: int) -> int:
        """Bytes from a layer's first to the last of its last block."""
        return (
            (num_blocks - 1) * self.block_stride
            + (self.num_heads - 1) * self.head_stride
            + (self.planes - 1) * self.plane_stride
            + self.unit_bytes
        )


_Group = Annotated[tuple[Layers, ...], Meta(max_length=MAX_LAYERS)]


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one rank's KV lies, by KV-cache group. Groups may lie over each other: a block is of one at a
    time. A pipeline stage may have no layers of some groups.

    Peers send it: `msgspec.ValidationError` is raised for one that leads outside its own regions.
    """

    regions: Annotated[tuple[_Bytes, ...], Meta(min_length=1, max_length=MAX_REGIONS)]
    """Their sizes."""
    num_blocks: _Count
    groups: Annotated[tuple[_Group, ...], Meta(min_length=1, max_length=MAX_GROUPS)]

    def __post_init__(self) -> None:
        for group in self.groups:
            if sum(layers.num_rows for layers in group) > MAX_TEMPLATE_ROWS:
                raise ValueError(f"a block of more than {MAX_TEMPLATE_ROWS} runs")
            if len({name for layers in group for name in layers.names}) != sum(
                len(layers.names) for layers in group
            ):
                raise ValueError("a layer stands twice in a group")
            for layers in group:
                self._check_inside(layers)

    def _check_inside(self, layers: Layers) -> None:
        reach = layers.reach(self.num_blocks)
        for each in layers.offsets:
            region, offset = each >> REGION_SHIFT, each & OFFSET_MASK
            if region >= len(self.regions) or offset + reach > self.regions[region]:
                raise ValueError(f"a layer at {offset} of region {region} leads outside of it")

    def narrowed(self, heads: range) -> Placement:
        """Only what it has of these heads. Raises ValueError if it has none of them."""
        groups = tuple(
            tuple(each for layers in group for each in layers.narrowed(heads)) for group in self.groups
        )
        if not any(groups):
            raise ValueError(f"no layer has any of the heads {heads.start} to {heads.stop - 1}")
        return msgspec.structs.replace(self, groups=groups)

    @property
    def only_layers(self) -> Layers:
        """The layers of a pool that has them in one group, all alike. Raises ValueError for another."""
        if len(self.groups) != 1 or len(self.groups[0]) != 1:
            raise ValueError("the layers of this pool do not all keep the same KV")
        return self.groups[0][0]


def pair_blocks(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> BlockPairs:
    """`remote_blocks[i]` goes to `local_blocks[i]`. Raises ValueError when the lists differ in length."""
    if len(local_blocks) != len(remote_blocks):
        raise ValueError(f"{len(local_blocks)} local blocks for {len(remote_blocks)} remote ones")
    pairs = np.ones((len(local_blocks), 3), dtype=np.int64)
    pairs[:, 0], pairs[:, 1] = local_blocks, remote_blocks
    return pairs


@dataclass(frozen=True, slots=True)
class LayerPairs:
    """Layers that a consumer's rank reads from a producer's: ours and theirs by number, and which heads."""

    ours: Layers
    theirs: Layers
    our_numbers: Sequence[int]
    their_numbers: Sequence[int]
    heads: range

    def spans(self) -> SpanTable:
        """Block 0's. Raises ValueError if a run is not the same on both sides."""
        for name in ("planes", "unit_bytes", "total_heads"):
            mine, other = getattr(self.ours, name), getattr(self.theirs, name)
            if mine != other:
                raise ValueError(f"{name}: theirs {other}, ours {mine}")
        ours = self._runs(self.ours, self.our_numbers)
        theirs = self._runs(self.theirs, self.their_numbers)
        rows = np.empty((ours.size, 3), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = ours.ravel(), theirs.ravel(), self.ours.unit_bytes
        return merge_spans(rows[np.argsort(rows[:, 0], kind="stable")])

    def _runs(self, layers: Layers, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        heads = slice(self.heads.start - layers.heads_start, self.heads.stop - layers.heads_start)
        return layers.runs[list(numbers), :, heads]


class BlockTemplate:
    """The bytes of one block of a group that a consumer's rank reads from a producer's, made once for a pair
    of ranks.

    Attributes:
        table: Shape [n, 5]: block 0's spans, and the strides from a block to the next, local and remote.
    """

    def __init__(self, table: npt.NDArray[np.int64]) -> None:
        self.table = table
        fills = (table[:, 3:] == table[:, 2:3]).all(axis=1)
        self._filling, self._others = table[fills], table[~fills]
        """Spans that fill their strides touch the next block's; the others do not."""

    @classmethod
    def of(cls, pairs: Sequence[LayerPairs]) -> BlockTemplate:
        """Return the template of layers that are all of one group."""
        tables = [each.spans() for each in pairs]
        strides = np.array([[each.ours.block_stride, each.theirs.block_stride] for each in pairs], np.int64)
        return cls(np.hstack([np.concatenate(tables), np.repeat(strides, list(map(len, tables)), axis=0)]))

    def spans(self, blocks: BlockPairs) -> SpanTable:
        """Return the spans of several blocks; those that touch on both sides are merged."""
        parts = ((self._filling, merge_spans(blocks)), (self._others, blocks))
        return np.concatenate([_repeat(rows, each) for rows, each in parts if len(rows)])


def _repeat(rows: npt.NDArray[np.int64], blocks: BlockPairs) -> SpanTable:
    """Return the spans of these rows of a template for each run of blocks."""
    spans = np.empty((len(rows), len(blocks), 3), dtype=np.int64)
    for side in range(2):
        spans[:, :, side] = rows[:, side, None] + rows[:, 3 + side, None] * blocks[:, side]
    spans[:, :, 2] = rows[:, 2, None] * blocks[:, 2]
    return spans.reshape(-1, 3)


ReadPlan = Mapping[int, Mapping[int, BlockTemplate]]
"""What one of our ranks reads, by the producer's rank and by group."""


def plan_reads(locals_: Sequence[Placement], remotes: Sequence[Placement]) -> list[ReadPlan]:
    """What each of our ranks reads from which producer rank; both in order of rank.

    Raises ValueError unless they have every head of each of our layers, in the same group and with the same
    content.
    """
    groups = {len(each.groups) for each in (*locals_, *remotes)}
    if len(groups) != 1:
        raise ValueError(f"KV-cache groups: theirs {len(remotes[0].groups)}, ours {len(locals_[0].groups)}")
    return [_plan_of_rank(rank, local, remotes) for rank, local in enumerate(locals_)]


def _plan_of_rank(rank: int, local: Placement, remotes: Sequence[Placement]) -> ReadPlan:
    plan: dict[int, dict[int, BlockTemplate]] = {}
    for group, ours in enumerate(local.groups):
        theirs = [remote.groups[group] for remote in remotes]
        pairs: dict[int, list[LayerPairs]] = {}
        for layers in ours:
            for remote_rank, each in _pair_layers(rank, layers, theirs):
                pairs.setdefault(remote_rank, []).append(each)
        for remote_rank, of_rank in pairs.items():
            plan.setdefault(remote_rank, {})[group] = BlockTemplate.of(of_rank)
    return plan


def _pair_layers(
    rank: int, ours: Layers, theirs: Sequence[Sequence[Layers]]
) -> Iterator[tuple[int, LayerPairs]]:
    """Our layers by who has them; `theirs` is one group by rank."""
    everywhere = [(remote_rank, layers) for remote_rank, group in enumerate(theirs) for layers in group]
    by_holders: dict[tuple[int, ...], list[int]] = {}
    for number, name in enumerate(ours.names):
        holders = tuple(at for at, (_, layers) in enumerate(everywhere) if name in layers.numbers)
        if not holders:
            raise ValueError(f"no rank of theirs has the layer {name.hex()}")
        by_holders.setdefault(holders, []).append(number)
    for holders, numbers in by_holders.items():
        held = [everywhere[at][1].heads for at in holders]
        for holder, heads in spread(ours.heads, held, rank):
            remote_rank, layers = everywhere[holders[holder]]
            their_numbers = [layers.numbers[ours.names[number]] for number in numbers]
            yield remote_rank, LayerPairs(ours, layers, numbers, their_numbers, heads)


def num_columns(placements: Sequence[Placement], group: int) -> int:
    """Heads of one block of a group over all ranks, in order of rank, then of `Layers`.

    One that several ranks hold counts once for each.
    """
    return sum(layers.num_heads for each in placements for layers in each.groups[group])


def column_numbers(placements: Sequence[Placement], parts: Sequence[Placement], group: int) -> list[int]:
    """Which columns of a group (`num_columns`) are those of `parts`: the placements, narrowed."""
    numbers: list[int] = []
    start = 0
    for whole, part in zip(placements, parts, strict=True):
        kept = {layers.names: layers.heads for layers in part.groups[group]}
        for layers in whole.groups[group]:
            heads = kept.get(layers.names, range(0))
            numbers += [start + head - layers.heads_start for head in heads]
            start += layers.num_heads
    return numbers


def source_columns(locals_: Sequence[Placement], remotes: Sequence[Placement], group: int) -> list[int]:
    """Where each of the consumer's columns (`num_columns`) comes from: the producer's column by its number.

    That is, of each head, the producer rank's that the consumer's rank reads it from (`plan_reads`). Raises
    ValueError where that rank does not hold the same layers: a column is of all of them.
    """
    theirs = [remote.groups[group] for remote in remotes]
    starts, total = {}, 0
    for remote_rank, each in enumerate(theirs):
        for number, layers in enumerate(each):
            starts[remote_rank, number] = total - layers.heads_start
            total += layers.num_heads
    columns: list[int] = []
    for rank, local in enumerate(locals_):
        for ours in local.groups[group]:
            for remote_rank, pairs in _pair_layers(rank, ours, theirs):
                if pairs.theirs.names != ours.names:
                    raise ValueError("verify_kv: a producer rank holds other layers (pipeline stages differ)")
                start = starts[remote_rank, theirs[remote_rank].index(pairs.theirs)]
                columns += [start + head for head in pairs.heads]
    return columns


@dataclass(frozen=True, slots=True, eq=False)
class LayerView:
    """One layer's KV on one rank, as a view of whatever strides: `[block, head, *run]`, or
    `[block, plane, head, *run]` with several planes.

    `heads` are those that the rank holds of `total_heads` (see `Layers`).
    """

    name: bytes
    tensor: torch.Tensor
    planes: int
    heads: range
    total_heads: int

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal for layers that one `Layers` can describe."""
        tensor = self.tensor
        shape = (tensor.shape, tensor.stride(), tensor.element_size())
        return *shape, self.planes, self.heads, self.total_heads


def placement_of(groups: Sequence[Sequence[LayerView]], num_blocks: int) -> Placement:
    """Describe one rank's KV by its layers' tensors, group by group.

    Raises ValueError if a run is not contiguous, or a tensor is not of `num_blocks` blocks.
    """
    storages = {
        view.tensor.untyped_storage().data_ptr(): view.tensor.untyped_storage().nbytes()
        for group in groups
        for view in group
    }
    bases = sorted(storages)
    described = []
    for group in groups:
        alike: dict[tuple[object, ...], list[LayerView]] = {}
        for view in group:
            if view.tensor.shape[0] != num_blocks:
                raise ValueError(f"{view.tensor.shape[0]} blocks in a layer's tensor, {num_blocks} expected")
            alike.setdefault(view.form, []).append(view)
        described.append(tuple(_layers_of(views, bases) for views in alike.values()))
    return Placement(
        regions=tuple(storages[base] for base in bases), num_blocks=num_blocks, groups=tuple(described)
    )


def _layers_of(views: Sequence[LayerView], bases: Sequence[int]) -> Layers:
    first = views[0]
    item = first.tensor.element_size()
    shape, strides = list(first.tensor.shape), [stride * item for stride in first.tensor.stride()]
    plane_stride = 0
    if first.planes > 1:
        plane_stride = strides.pop(1)
        if shape.pop(1) != first.planes:
            raise ValueError(f"{first.tensor.shape[1]} planes in the tensors, {first.planes} expected")
    unit = item
    for size, stride in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if size > 1 and stride != unit:
            raise ValueError(f"the KV of a block and head is not contiguous: strides {first.tensor.stride()}")
        unit *= size
    if shape[1] != len(first.heads):
        raise ValueError(f"{shape[1]} heads in the tensors, {len(first.heads)} expected")
    return Layers(
        names=tuple(view.name for view in views),
        offsets=tuple(_virtual(view.tensor.data_ptr(), bases) for view in views),
        block_stride=strides[0],
        num_heads=len(first.heads),
        heads_start=first.heads.start,
        total_heads=first.total_heads,
        head_stride=strides[1],
        planes=first.planes,
        plane_stride=plane_stride,
        unit_bytes=unit,
    )


def _virtual(address: int, bases: Sequence[int]) -> int:
    region = bisect_right(bases, address) - 1
    return (region << REGION_SHIFT) + address - bases[region]
