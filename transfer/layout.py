# SPDX-License-Identifier: Apache-2.0
"""Where a prompt's KV lies in a rank's pool, and which bytes a reader must fetch from which rank.

A pool is one tensor `[block, kv_head, layer, K|V, token, head_dim]`, so one block's slice for any run of
heads is one contiguous span, whatever the TP sizes on either side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

DType = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_Text = Annotated[str, Meta(max_length=4096)]
"""Peers send it."""

SpanTable = npt.NDArray[np.int64]
"""Shape [n, 3]; columns are local offset, remote offset and length, in bytes from the start of each pool."""


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
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

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
        if self.num_kv_heads % tp_size == 0:
            share = self.num_kv_heads // tp_size
            return range(rank * share, (rank + 1) * share)
        if tp_size % self.num_kv_heads == 0:
            head = rank // (tp_size // self.num_kv_heads)
            return range(head, head + 1)
        raise ValueError(f"{self.num_kv_heads} KV heads cannot be split over {tp_size} ranks")


def differences(ours: KVGeometry, theirs: KVGeometry) -> list[tuple[str, str, str]]:
    """The fields in which two geometries differ, as (field, ours, theirs)."""
    return [
        (name, str(getattr(ours, name)), str(getattr(theirs, name)))
        for name in KVGeometry.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]


def plan_spans(
    geometry: KVGeometry,
    *,
    tp_size: int,
    rank: int,
    remote_tp_size: int,
    local_blocks: Sequence[int],
    remote_blocks: Sequence[int],
) -> dict[int, SpanTable]:
    """The bytes that one consumer rank must read, by producer rank.

    Block `remote_blocks[i]` of the producer goes to block `local_blocks[i]`. Spans that touch on both
    sides are merged. Where several producer ranks hold the same heads, readers spread over them. Raises
    ValueError when the two lists differ in length or a TP size does not divide the heads.
    """
    if len(local_blocks) != len(remote_blocks):
        raise ValueError(f"{len(local_blocks)} local blocks for {len(remote_blocks)} remote ones")
    local, remote = (np.asarray(blocks, dtype=np.int64) for blocks in (local_blocks, remote_blocks))
    mine = geometry.local_heads(tp_size, rank)
    plan: dict[int, SpanTable] = {}
    for remote_rank, heads in _sources(geometry, tp_size, rank, remote_tp_size):
        theirs = geometry.local_heads(remote_tp_size, remote_rank)
        table = np.empty((len(local), 3), dtype=np.int64)
        table[:, 0] = local * len(mine) + (heads.start - mine.start)
        table[:, 1] = remote * len(theirs) + (heads.start - theirs.start)
        table[:, 2] = len(heads)
        plan[remote_rank] = merge_spans(table * geometry.head_block_bytes)
    return plan


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


def check_bounds(spans: SpanTable, local_bytes: int, remote_bytes: int) -> None:
    """Raise ValueError for a span outside either pool, where a backend might read or write anything.

    It runs once per read, hence column by column: reducing along the rows takes three times as long.
    """
    if not len(spans):
        return
    length = spans[:, 2]
    if spans.min() < 0 or (spans[:, 1] + length).max() > remote_bytes:
        raise ValueError("a span lies outside the peer's pool")
    if (spans[:, 0] + length).max() > local_bytes:
        raise ValueError("a span lies outside the pool")


def num_columns(geometry: KVGeometry, tp_size: int) -> int:
    """Heads over all ranks, in order of rank; one that several ranks hold counts once for each."""
    return sum(len(geometry.local_heads(tp_size, rank)) for rank in range(tp_size))


def source_columns(geometry: KVGeometry, *, tp_size: int, remote_tp_size: int) -> list[int]:
    """Where each of the consumer's columns (`num_columns`) comes from: the producer's column by its number.

    That is, of each head, the producer rank's that `plan_spans` has the consumer's rank read from.
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
            for remote_rank, heads in _sources(geometry, tp_size, rank, remote_tp_size)
            for head in heads
        }
        columns += [column_of[head] for head in mine]
    return columns


@lru_cache(maxsize=256)  # every read waits for this, and between two agents it is always the same
def _sources(
    geometry: KVGeometry, tp_size: int, rank: int, remote_tp_size: int
) -> tuple[tuple[int, range], ...]:
    """Which run of a rank's heads comes from which producer rank; each head from exactly one."""
    mine = geometry.local_heads(tp_size, rank)
    holders: dict[range, list[int]] = {}
    for remote_rank in range(remote_tp_size):
        theirs = geometry.local_heads(remote_tp_size, remote_rank)
        shared = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
        if shared:
            holders.setdefault(shared, []).append(remote_rank)
    return tuple((ranks[rank % len(ranks)], heads) for heads, ranks in holders.items())
