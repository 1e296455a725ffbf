# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.transfer.checksum import (
    PoolSums,
    first_mismatch,
    pack_sums,
    row_widths,
    split_rows,
    totals,
    unpack_sums,
    word_keys,
)
from kvferry.transfer.layout import KVGeometry, LayerView, Placement, num_columns, source_columns
from kvferry.transfer.memory import own_pool, pool_of_layers
from tests.helpers.gpu import needs_gpus
from tests.unit.transfer.plans import plan_spans
from tests.unit.transfer.rig import GEOMETRY


def random_pool(geometry: KVGeometry, heads: int, seed: int = 0) -> torch.Tensor:
    shape = geometry.pool_shape(6, heads)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(getattr(torch, geometry.dtype))


def placements(geometry: KVGeometry, tp_size: int) -> list[Placement]:
    """Of an agent's ranks."""
    heads = [len(geometry.local_heads(tp_size, rank)) for rank in range(tp_size)]
    pools = [random_pool(geometry, each) for each in heads]
    return [own_pool(pool, geometry, tp_size, rank).placement for rank, pool in enumerate(pools)]


def plainly(slice_: torch.Tensor, word: str) -> int:
    """The definition, word by word."""
    words = np.frombuffer(slice_.contiguous().view(torch.uint8).numpy().tobytes(), dtype=word).tolist()
    total = sum(key * each for key, each in zip(word_keys(len(words)).tolist(), words, strict=True))
    return (total % 2**64) >> 32


def test_the_keys_are_splitmix64() -> None:
    """The published first outputs for the seed 0: sums must agree between versions and machines."""
    keys = word_keys(3).view(np.uint64).tolist()
    assert keys == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("geometry", [
    GEOMETRY,
    KVGeometry(num_layers=1, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_size=4, rope="r"),
    KVGeometry(num_layers=1, num_kv_heads=1, head_dim=3, dtype="float16", block_size=1, rope="r", mla=True),
], ids=["float32", "bfloat16", "odd"])  # fmt: skip
def test_a_sum_is_what_its_definition_says(geometry: KVGeometry) -> None:
    heads = geometry.num_kv_heads
    pool = random_pool(geometry, heads)
    word = "<i4" if geometry.head_block_bytes % 4 == 0 else "<i2"
    sums = PoolSums(own_pool(pool, geometry, 1, 0)).sums(0, [4, 0])
    assert sums.tolist() == [[plainly(pool[block, head], word) for head in range(heads)] for block in (4, 0)]


def test_a_gpus_arithmetic_is_a_cpus() -> None:
    """Its expression, here on the CPU: agents with pools in either kind of memory understand each other."""
    pool = random_pool(GEOMETRY, 4)
    words, keys = pool.view(6, 4, -1).view(torch.int32), torch.from_numpy(word_keys(pool[0, 0].numel()))
    found = totals(words, keys, range(6)).numpy().view(np.uint64) >> np.uint64(32)
    assert found.tolist() == PoolSums(own_pool(pool, GEOMETRY, 1, 0)).sums(0, range(6)).tolist()


@pytest.mark.parametrize("order", ["LBHC", "LHBC", "BLHC", "BHLC"])
def test_a_sum_does_not_depend_on_where_a_pool_has_its_layers(order: str) -> None:
    """Agents whose engines lay their pools out differently understand each other."""
    size = {"L": 3, "B": 6, "H": 4, "C": 10}
    numbers = torch.randn([size[each] for each in "BHLC"], generator=torch.Generator().manual_seed(0))
    pool = numbers.permute(["BHLC".index(each) for each in order]).contiguous()
    layers = [pool.select(order.index("L"), layer) for layer in range(3)]
    left = order.replace("L", "")
    layers = [layer.permute([left.index(each) for each in "BHC"]) for layer in layers]
    views = [LayerView(b"%d" % number, layer, 1, range(4), 4) for number, layer in enumerate(layers)]
    found = PoolSums(pool_of_layers([views], len(layers[0]))).sums(0, [4, 0])
    assert found.tolist() == [[plainly(numbers[block, head], "<i4") for head in range(4)] for block in (4, 0)]


@pytest.mark.gpu
@needs_gpus(1)
def test_a_pool_on_a_gpu_has_the_same_sums() -> None:
    pool = random_pool(GEOMETRY, 4)
    expected = PoolSums(own_pool(pool, GEOMETRY, 1, 0)).sums(0, range(6))
    assert np.array_equal(PoolSums(own_pool(pool.cuda(), GEOMETRY, 1, 0)).sums(0, range(6)), expected)


def test_damage_changes_the_sums_of_its_slice_alone() -> None:
    """A bit, two words that changed places, and the flip of the tcp backend's fault in every element."""
    pool = random_pool(GEOMETRY, 4)
    sums = PoolSums(own_pool(pool, GEOMETRY, 1, 0))
    before = sums.sums(0, range(6))
    words = pool.view(torch.int32)
    damages = [
        lambda part: part.view(-1)[7:8].bitwise_xor_(1),
        lambda part: part.view(-1)[:2].copy_(part.view(-1)[:2].flip(0)),
        lambda part: part.bitwise_xor_(0x40000000),
        lambda part: part.zero_(),
    ]
    for damage in damages:
        kept = words[3, 2].clone()
        damage(words[3, 2])
        assert np.argwhere(sums.sums(0, range(6)) != before).tolist() == [[3, 2]]
        words[3, 2] = kept


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("remote_tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_columns_come_from_where_the_bytes_do(tp_size: int, remote_tp_size: int, mla: bool) -> None:
    """Both sides number their columns by rank, so they meet at any TP ratio, and for replicated heads."""
    geometry = KVGeometry(
        num_layers=1, num_kv_heads=4, head_dim=2, dtype="float32", block_size=1, rope="r", mla=mla
    )
    columns = source_columns(placements(geometry, tp_size), placements(geometry, remote_tp_size), 0)
    assert len(columns) == num_columns(placements(geometry, tp_size), 0)
    named = []
    for rank in range(tp_size):
        plan = plan_spans(
            geometry, tp_size=tp_size, rank=rank, remote_tp_size=remote_tp_size,
            local_blocks=[0], remote_blocks=[0],
        )  # fmt: skip
        slices = []
        for remote_rank, table in plan.items():
            before = sum(len(geometry.local_heads(remote_tp_size, each)) for each in range(remote_rank))
            for local, remote, length in (table // geometry.head_block_bytes).tolist():
                slices += [(local + each, before + remote + each) for each in range(length)]
        named += [column for _, column in sorted(slices)]
    assert columns == named


def test_a_mismatch_is_named_by_block_and_head() -> None:
    theirs = np.arange(6, dtype=np.uint32).reshape(3, 2)
    packed = split_rows(pack_sums(theirs), [2, 2, 2])
    assert first_mismatch(theirs[:, ::-1], packed, [7, 8, 9], [1, 0]) == ""
    ours = theirs.copy()
    ours[1, 1] += 1
    assert first_mismatch(ours, packed, [7, 8, 9], [0, 1]) == "1 of 6 slices differ, first block 8, head 1"


def test_checksums_that_are_no_whole_rows_are_no_checksums() -> None:
    assert split_rows(b"\0" * 24, [2, 2, 2]) == (b"\0" * 8,) * 3
    assert split_rows(b"\0" * 24, [1, 0, 5]) == (b"\0" * 4, b"", b"\0" * 20)
    for packed in (b"\0" * 23, b"\0" * 28):
        assert split_rows(packed, [2, 2, 2]) == ()
    with pytest.raises(ValueError, match="reshape"):
        unpack_sums(b"\0" * 12, 2)


@pytest.mark.parametrize("counts", [(), (3, 2), (2**40, 2**40)])
@pytest.mark.parametrize("first", [0, 1, 4, 2**40])
@pytest.mark.parametrize("num", [0, 1, 4])
@pytest.mark.timeout(10)
def test_widths_of_rows_are_those_of_their_groups_whatever_the_producer_says(
    counts: tuple[int, ...], first: int, num: int
) -> None:
    widths = list(row_widths((4, 2), counts, first, num))
    assert len(widths) <= num
    if not counts:
        assert widths == [4] * num
    elif counts == (3, 2):
        assert widths == [4, 4, 4, 2, 2][first : first + num]
