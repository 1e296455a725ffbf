# SPDX-License-Identifier: Apache-2.0
"""Placements are read off tensors of any engine; what a template moves is the prompt's KV and no more."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from kvferry.transfer.layout import (
    REGION_SHIFT,
    BlockTemplate,
    KVGeometry,
    Placement,
    pair_blocks,
    placement_of,
)
from tests.unit.transfer.plans import pool_placement

BLOCKS, HEADS, LAYERS, TOKENS, DIM = 7, 4, 3, 4, 2
SIZE = {"B": BLOCKS, "L": LAYERS, "N": TOKENS, "C": 2 * DIM, "P": 2, "D": DIM}
MINE, THEIRS = [1, 2, 5], [6, 0, 3]


@dataclass(frozen=True)
class Pool:
    """One rank's KV, one view per layer: `[block, (plane,) head, token, …]`."""

    layers: list[torch.Tensor]
    planes: int
    placement: Placement

    def bytes_of(self, block: int) -> np.ndarray:
        """One block in the engines' common order: layer, plane, head, token."""
        return np.stack([layer[block].numpy() for layer in self.layers])

    def regions(self) -> list[np.ndarray]:
        """The memory of the regions, as bytes that can be written."""
        storages = {layer.untyped_storage().data_ptr(): layer.untyped_storage() for layer in self.layers}
        return [
            torch.tensor([], dtype=torch.uint8).set_(storages[base]).numpy()
            for base in sorted(storages)  # type: ignore[call-overload]
        ]


def one_allocation(order: str, heads: range, seed: int) -> Pool:
    """vLLM 0.29+ in a layout of that name, and ours: all layers share an allocation."""
    size = SIZE | {"H": len(heads)}
    pool = torch.from_numpy(
        np.random.default_rng(seed).random([size[each] for each in order]).astype(np.float32)
    )
    inner = "BPHND" if "P" in order else "BHNC"
    layers = [pool.select(order.index("L"), layer) for layer in range(LAYERS)]
    left = order.replace("L", "")
    layers = [layer.permute([left.index(each) for each in inner]) for layer in layers]
    planes = 2 if "P" in order else 1
    return Pool(layers, planes, placement_of(layers, planes=planes, heads=heads))


def per_layer(order: str, heads: range, seed: int) -> Pool:
    """vLLM 0.24 to 0.28: an allocation per layer."""
    size = SIZE | {"H": len(heads)}
    random = np.random.default_rng(seed)
    inner = "BPHND" if "P" in order else "BHNC"
    layers = [
        torch.from_numpy(random.random([size[each] for each in order]).astype(np.float32)).permute(
            [order.index(each) for each in inner]
        )
        for _ in range(LAYERS)
    ]
    planes = 2 if "P" in order else 1
    return Pool(layers, planes, placement_of(layers, planes=planes, heads=heads))


def make(name: str, heads: range, seed: int) -> Pool:
    return (one_allocation if "L" in name else per_layer)(name, heads, seed)


def copy(spans: np.ndarray, ours: Pool, theirs: Pool) -> None:
    """Do what a backend does with spans."""
    mine, others = ours.regions(), theirs.regions()
    low = (1 << REGION_SHIFT) - 1
    for local, remote, length in spans.tolist():
        source = others[remote >> REGION_SHIFT][remote & low : (remote & low) + length]
        assert len(source) == length
        mine[local >> REGION_SHIFT][local & low : (local & low) + length] = source


ONE_PLANE = ["LBHNC", "LHBNC", "BLHNC", "BHLNC", "BHNC"]
"""vLLM 0.29+ by the names of its layouts, and 0.24 to 0.28 on CPUs."""
TWO_PLANES = ["BHLPND", "BPHLND", "BPHND", "BHPND"]
"""Ours and vLLM's across layers, FlashInfer's across layers, FlashAttention's and Triton's per layer."""
PAIRS = [(a, b) for family in (ONE_PLANE, TWO_PLANES) for a in family for b in family]


@pytest.mark.parametrize(("local", "remote"), PAIRS)
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(range(4), range(4)), (range(2, 4), range(4)), (range(4), range(2))],
    ids=["equal", "reader has half", "producer has half"],
)
def test_any_layout_reads_from_any_other_of_the_same_content(
    local: str, remote: str, mine: range, theirs: range
) -> None:
    ours, others = make(local, mine, 1), make(remote, theirs, 2)
    shared = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
    wanted = np.stack([ours.bytes_of(block) for block in range(BLOCKS)])
    axis = -3  # heads, before tokens and what a token holds
    at = [slice(None)] * wanted[0].ndim
    to, come = list(at), list(at)
    to[axis] = slice(shared.start - mine.start, shared.stop - mine.start)
    come[axis] = slice(shared.start - theirs.start, shared.stop - theirs.start)
    for mine_block, their_block in zip(MINE, THEIRS, strict=True):
        wanted[mine_block][tuple(to)] = others.bytes_of(their_block)[tuple(come)]
    copy(
        BlockTemplate(ours.placement, others.placement, shared).spans(pair_blocks(MINE, THEIRS)), ours, others
    )
    assert np.array_equal(np.stack([ours.bytes_of(block) for block in range(BLOCKS)]), wanted)


@pytest.mark.parametrize(("local", "remote"), [("BHLPND", "BHLPND"), ("BHLNC", "BHLNC")])
def test_blocks_that_hold_all_layers_are_one_span_at_any_tensor_parallelism(local: str, remote: str) -> None:
    whole, half = make(local, range(4), 1), make(remote, range(2, 4), 2)
    assert BlockTemplate(whole.placement, half.placement, range(2, 4)).num_rows == 1
    assert BlockTemplate(half.placement, whole.placement, range(2, 4)).num_rows == 1


def test_neighbours_are_one_span() -> None:
    ours, others = make("BHLNC", range(4), 1), make("BHLNC", range(4), 2)
    template = BlockTemplate(ours.placement, others.placement, range(4))
    assert len(template.spans(pair_blocks([1, 2, 3], [4, 5, 6]))) == 1
    layers = BlockTemplate(*(make("LBHNC", range(4), seed).placement for seed in (1, 2)), range(4))
    assert len(layers.spans(pair_blocks([1, 2, 3], [4, 5, 6]))) == LAYERS
    assert len(layers.spans(pair_blocks([], []))) == 0


@pytest.mark.parametrize("mla", [False, True])
def test_our_own_pools_are_described_without_tensors(mla: bool) -> None:
    geometry = KVGeometry(
        num_layers=LAYERS, num_kv_heads=4, head_dim=DIM, dtype="float32", block_size=TOKENS, rope="r", mla=mla
    )
    heads = geometry.local_heads(2, 1)
    pool = torch.zeros(geometry.pool_shape(BLOCKS, len(heads)))
    layers = [pool[:, :, layer].transpose(1, 2) for layer in range(LAYERS)]
    layers = [layer[:, 0] for layer in layers] if mla else layers
    described = placement_of(layers, planes=1 if mla else 2, heads=heads)
    assert described == pool_placement(geometry, BLOCKS, heads)


def test_layers_that_share_memory_count_once() -> None:
    pool = make("BHNC", range(4), 1)
    shared = placement_of([*pool.layers, pool.layers[0]], planes=1, heads=range(4))
    assert shared == pool.placement


def test_mla_is_one_head() -> None:
    """`[block, token, latent]`, the same on every rank."""
    latent = torch.zeros(BLOCKS, TOKENS, 6)
    placement = placement_of([latent.unsqueeze(1)], planes=1, heads=range(1))
    assert (placement.num_heads, placement.unit_bytes) == (1, TOKENS * 6 * 4)


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_tokens_before_heads_are_refused(order: str) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        one_allocation(order, range(4), 1)


def test_what_differs_in_content_is_refused() -> None:
    one, two = make("BHLNC", range(4), 1), make("BHLPND", range(4), 1)
    with pytest.raises(ValueError, match="planes: theirs 2, ours 1"):
        BlockTemplate(one.placement, two.placement, range(4))
    fewer = placement_of(one.layers[:2], planes=1, heads=range(4))
    with pytest.raises(ValueError, match="layers: theirs 2, ours 3"):
        BlockTemplate(one.placement, fewer, range(4))
    with pytest.raises(ValueError, match="heads"):
        BlockTemplate(one.placement, one.placement, range(5))
    with pytest.raises(ValueError, match="3 local blocks for 2"):
        pair_blocks(MINE, [1, 2])


def changed(placement: Placement, **fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.to_builtins(placement), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": BLOCKS + 1},
        {"layers": [1 << REGION_SHIFT]},
        {"block_stride": 1 << 40},
        {"unit_bytes": 1 << 40},
        {"regions": []},
        {"num_heads": 0},
        {"layers": [0] * 5000},
        {"num_heads": 1 << 30, "head_stride": 0},
        {"unknown": 1},
    ],
)
def test_a_peers_placement_cannot_lead_outside_its_memory(fields: dict[str, object]) -> None:
    placement = make("BHLNC", range(4), 1).placement
    assert msgspec.msgpack.decode(changed(placement), type=Placement) == placement
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(changed(placement, **fields), type=Placement)


def test_regions_are_numbered_by_address() -> None:
    pool = make("BHNC", range(4), 1)
    assert len(pool.placement.regions) == LAYERS
    assert {layer >> REGION_SHIFT for layer in pool.placement.layers} == set(range(LAYERS))
