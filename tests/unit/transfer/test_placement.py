# SPDX-License-Identifier: Apache-2.0
"""Placements are read off tensors of any engine; what a template moves is the prompt's KV and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.transfer.layout import (
    REGION_SHIFT,
    BlockTemplate,
    KVGeometry,
    LayerPairs,
    LayerView,
    Placement,
    pair_blocks,
    placement_of,
    plan_reads,
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
    return Pool(layers, planes, described(layers, planes, heads))


def described(layers: list[torch.Tensor], planes: int, heads: range) -> Placement:
    """Layers of one group, which are named by their number."""
    views = [
        LayerView(number.to_bytes(2, "big"), layer, planes, heads, HEADS)
        for number, layer in enumerate(layers)
    ]
    return placement_of([views], len(layers[0]))


def template(ours: Placement, theirs: Placement, heads: range) -> BlockTemplate:
    """Of all layers of two pools with one group."""
    numbers = range(len(ours.only_layers.names))
    return BlockTemplate.of([LayerPairs(ours.only_layers, theirs.only_layers, numbers, numbers, heads)])


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
    return Pool(layers, planes, described(layers, planes, heads))


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
    copy(template(ours.placement, others.placement, shared).spans(pair_blocks(MINE, THEIRS)), ours, others)
    assert np.array_equal(np.stack([ours.bytes_of(block) for block in range(BLOCKS)]), wanted)


@pytest.mark.parametrize(("local", "remote"), [("BHLPND", "BHLPND"), ("BHLNC", "BHLNC")])
def test_blocks_that_hold_all_layers_are_one_span_at_any_tensor_parallelism(local: str, remote: str) -> None:
    whole, half = make(local, range(4), 1), make(remote, range(2, 4), 2)
    assert template(whole.placement, half.placement, range(2, 4)).table.shape == (1, 5)
    assert template(half.placement, whole.placement, range(2, 4)).table.shape == (1, 5)


def test_neighbours_are_one_span() -> None:
    ours, others = make("BHLNC", range(4), 1), make("BHLNC", range(4), 2)
    whole = template(ours.placement, others.placement, range(4))
    assert len(whole.spans(pair_blocks([1, 2, 3], [4, 5, 6]))) == 1
    one, two = (make("LBHNC", range(4), seed).placement for seed in (1, 2))
    layers = template(one, two, range(4))
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
    total_heads, planes = (1, 1) if mla else (4, 2)
    views = [
        LayerView(number.to_bytes(2, "big"), layer, planes, heads, total_heads)
        for number, layer in enumerate(layers)
    ]
    assert placement_of([views], BLOCKS) == pool_placement(geometry, BLOCKS, heads)


def view(name: bytes, tensor: torch.Tensor, heads: range = range(1), total_heads: int = 1) -> LayerView:
    return LayerView(name, tensor, 1, heads, total_heads)


def test_groups_may_lie_over_each_other() -> None:
    """As vLLM 0.29+ has them: a block of one group has the bytes of another group's."""
    memory = torch.arange(BLOCKS * 24, dtype=torch.uint8).view(BLOCKS, 1, 24)
    full = [view(b"0", memory[..., :12]), view(b"1", memory[..., 12:])]
    window = [view(b"2", memory[..., :12]), view(b"3", memory[..., 12:])]
    state = [view(b"4", memory[..., :20])]
    ours = placement_of([full, window, state], BLOCKS)
    assert ours.regions == (BLOCKS * 24,)
    (plan,) = plan_reads([ours], [ours])
    assert plan.keys() == {0} and plan[0].keys() == {0, 1, 2}
    pairs = pair_blocks([1], [4])
    assert plan[0][0].spans(pairs).tolist() == plan[0][1].spans(pairs).tolist() == [[24, 96, 24]]
    assert plan[0][2].spans(pairs).tolist() == [[24, 96, 20]], "padding is not copied"


def test_layers_of_one_group_may_have_pages_of_different_size() -> None:
    wide, narrow = torch.zeros(BLOCKS, 1, 16), torch.zeros(BLOCKS, 1, 4)
    ours = placement_of([[view(b"a", wide), view(b"b", narrow)]], BLOCKS)
    (plan,) = plan_reads([ours], [ours])
    assert sorted(length for *_, length in plan[0][0].spans(pair_blocks([1], [2])).tolist()) == [16, 64]


@pytest.mark.parametrize(("ours", "theirs"), [((2,), (1, 1)), ((1, 1), (2,)), ((2,), (2,)), ((1, 1), (1, 1))])
def test_stages_find_their_layers_by_name(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    """Pipeline stages: `ours` and `theirs` are how many of two layers each rank has."""

    def stages(counts: tuple[int, ...], seed: int) -> tuple[list[torch.Tensor], list[Placement]]:
        random = np.random.default_rng(seed)
        pools = [torch.from_numpy(random.random((BLOCKS, count, 3))) for count in counts]
        names = iter((b"first", b"second"))
        return pools, [
            placement_of([[view(next(names), pool[:, n : n + 1]) for n in range(count)]], BLOCKS)
            for pool, count in zip(pools, counts, strict=True)
        ]

    mine, my_places = stages(ours, 1)
    other, their_places = stages(theirs, 2)
    plans = plan_reads(my_places, their_places)
    for rank, plan in enumerate(plans):
        for remote_rank, templates in plan.items():
            for local, remote, length in templates[0].spans(pair_blocks([3], [5])).tolist():
                into, source = (
                    pools[at].view(-1).view(torch.uint8) for pools, at in ((mine, rank), (other, remote_rank))
                )
                into[local : local + length] = source[remote : remote + length]
    assert torch.equal(torch.cat([each[3] for each in mine]), torch.cat([each[5] for each in other]))


def test_what_each_rank_has_of_its_own_is_read_from_the_same_rank() -> None:
    """A state, or pages whose heads cannot be told apart."""
    ranks = [
        placement_of([[view(b"s", torch.zeros(BLOCKS, 1, 4), range(rank, rank + 1), 2)]], BLOCKS)
        for rank in range(2)
    ]
    assert [list(plan) for plan in plan_reads(ranks, ranks)] == [[0], [1]]
    with pytest.raises(ValueError, match="no rank of theirs has head 1"):
        plan_reads(ranks, ranks[:1])
    whole = placement_of([[view(b"s", torch.zeros(BLOCKS, 1, 4))]], BLOCKS)
    with pytest.raises(ValueError, match="total_heads: theirs 2, ours 1"):
        plan_reads([whole], ranks)


def test_a_layer_or_a_group_without_a_partner_is_refused() -> None:
    tensor = torch.zeros(BLOCKS, 1, 4)
    one = placement_of([[view(b"a", tensor)]], BLOCKS)
    drafts = placement_of([[view(b"a", tensor), view(b"draft", torch.zeros(BLOCKS, 1, 4))]], BLOCKS)
    with pytest.raises(ValueError, match=f"no rank of theirs has the layer {b'draft'.hex()}"):
        plan_reads([drafts], [one])
    assert plan_reads([one], [drafts])
    two = placement_of([[view(b"a", tensor)], [view(b"b", tensor)]], BLOCKS)
    with pytest.raises(ValueError, match="KV-cache groups: theirs 2, ours 1"):
        plan_reads([one], [two])
    swapped = placement_of([[view(b"b", tensor)], [view(b"a", tensor)]], BLOCKS)
    with pytest.raises(ValueError, match="no rank of theirs has the layer"):
        plan_reads([two], [swapped])


def test_mla_is_one_head() -> None:
    """`[block, token, latent]`, the same on every rank."""
    latent = torch.zeros(BLOCKS, TOKENS, 6)
    layers = placement_of([[view(b"0", latent.unsqueeze(1))]], BLOCKS).only_layers
    assert (layers.num_heads, layers.unit_bytes) == (1, TOKENS * 6 * 4)


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_tokens_before_heads_are_refused(order: str) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        one_allocation(order, range(4), 1)


def test_what_differs_in_content_is_refused() -> None:
    one, two = make("BHLNC", range(4), 1), make("BHLPND", range(4), 1)
    with pytest.raises(ValueError, match="planes: theirs 2, ours 1"):
        template(one.placement, two.placement, range(4))
    fewer = described(one.layers[:2], 1, range(4))
    with pytest.raises(ValueError, match="no rank of theirs has the layer 0002"):
        plan_reads([one.placement], [fewer])
    half = make("BHLNC", range(2), 1)
    with pytest.raises(ValueError, match="no rank of theirs has head 2"):
        plan_reads([one.placement], [half.placement])
    with pytest.raises(ValueError, match="3 local blocks for 2"):
        pair_blocks(MINE, [1, 2])


def changed(placement: Placement, **fields: Any) -> bytes:
    """With other values of its own or of its layers' fields."""
    built = msgspec.to_builtins(placement, builtin_types=(bytes,))
    layers = built["groups"][0][0]
    for name, value in fields.items():
        (layers if name in layers else built)[name] = value
    return msgspec.msgpack.encode(built)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": BLOCKS + 1},
        {"offsets": [1 << REGION_SHIFT] * LAYERS},
        {"offsets": [0]},
        {"names": [b"0"] * LAYERS},
        {"groups": []},
        {"block_stride": 1 << 40},
        {"unit_bytes": 1 << 40},
        {"regions": []},
        {"num_heads": 0},
        {"offsets": [0] * 5000, "names": [b"%d" % each for each in range(5000)]},
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
    assert {layer >> REGION_SHIFT for layer in pool.placement.only_layers.offsets} == set(range(LAYERS))
