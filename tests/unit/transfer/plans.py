# SPDX-License-Identifier: Apache-2.0
"""Contiguous pools, which our own agent has: their placements, and spans between them."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.transfer.layout import KVGeometry, Layers, Placement, SpanTable, pair_blocks, plan_reads


def pool_placement(geometry: KVGeometry, num_blocks: int, heads: range) -> Placement:
    """That of a contiguous pool of `geometry.pool_shape`, which is our own agent's."""
    planes = 1 if geometry.mla else 2
    unit = geometry.block_size * geometry.head_dim * geometry.item_bytes
    block_bytes = len(heads) * geometry.head_block_bytes
    layers = Layers(
        names=tuple(layer.to_bytes(2, "big") for layer in range(geometry.num_layers)),
        offsets=tuple(layer * planes * unit for layer in range(geometry.num_layers)),
        block_stride=block_bytes,
        num_heads=len(heads),
        heads_start=heads.start,
        total_heads=1 if geometry.mla else geometry.num_kv_heads,
        head_stride=geometry.head_block_bytes,
        planes=planes,
        plane_stride=0 if geometry.mla else unit,
        unit_bytes=unit,
    )
    return Placement(regions=(num_blocks * block_bytes,), num_blocks=num_blocks, groups=((layers,),))


def plan_spans(
    geometry: KVGeometry,
    *,
    tp_size: int,
    rank: int,
    remote_tp_size: int,
    local_blocks: Sequence[int],
    remote_blocks: Sequence[int],
    num_blocks: int = 16,
) -> dict[int, SpanTable]:
    """The bytes that one consumer rank must read, by producer rank."""
    ours, theirs = (
        [pool_placement(geometry, num_blocks, geometry.local_heads(size, each)) for each in range(size)]
        for size in (tp_size, remote_tp_size)
    )
    plan = plan_reads(ours, theirs)[rank]
    return {
        each: templates[0].spans(pair_blocks(local_blocks, remote_blocks)) for each, templates in plan.items()
    }
