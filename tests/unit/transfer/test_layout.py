# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from kvferry.transfer.layout import (
    KVGeometry,
    SpanTable,
    check_bounds,
    differences,
    merge_spans,
    split_heads,
)
from tests.unit.transfer.plans import plan_spans

GQA = KVGeometry(num_layers=3, num_kv_heads=4, head_dim=2, dtype="float32", block_size=2, rope="default")
MLA = KVGeometry(
    num_layers=3, num_kv_heads=1, head_dim=6, dtype="float32", block_size=2, rope="default", mla=True
)
NUM_BLOCKS = 12
REMOTE = [4, 5, 6, 1, 9]
LOCAL = [7, 8, 2, 3, 11]


def pools(geometry: KVGeometry, tp_size: int, seed: int) -> list[np.ndarray]:
    """Every rank's pool; ranks that hold the same head hold the same bytes."""
    heads = 1 if geometry.mla else geometry.num_kv_heads
    whole = np.random.default_rng(seed).random(geometry.pool_shape(NUM_BLOCKS, heads)).astype(np.float32)
    ranges = [geometry.local_heads(tp_size, rank) for rank in range(tp_size)]
    return [whole[:, held.start : held.stop].copy() for held in ranges]


def copy_spans(local: np.ndarray, remote: np.ndarray, table: SpanTable) -> None:
    into, source = local.reshape(-1).view(np.uint8), remote.reshape(-1).view(np.uint8)
    for ours, theirs, nbytes in table.tolist():
        into[ours : ours + nbytes] = source[theirs : theirs + nbytes]


def copy_naively(geometry: KVGeometry, local: list[np.ndarray], remote: list[np.ndarray]) -> None:
    """Element by element, from whichever producer rank holds the head first."""
    heads = 1 if geometry.mla else geometry.num_kv_heads
    for head in range(heads):
        source = next(
            pool[:, head - geometry.local_heads(len(remote), rank).start]
            for rank, pool in enumerate(remote)
            if head in geometry.local_heads(len(remote), rank)
        )
        for rank, pool in enumerate(local):
            held = geometry.local_heads(len(local), rank)
            if head in held:
                for ours, theirs in zip(LOCAL, REMOTE, strict=True):
                    for place in np.ndindex(source.shape[1:]):
                        pool[(ours, head - held.start, *place)] = source[(theirs, *place)]


@pytest.mark.parametrize("geometry", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("remote_tp_size", [1, 2, 4, 8])
def test_spans_copy_what_an_element_by_element_copy_does(
    geometry: KVGeometry, tp_size: int, remote_tp_size: int
) -> None:
    remote = pools(geometry, remote_tp_size, seed=1)
    by_spans = pools(geometry, tp_size, seed=2)
    naively = pools(geometry, tp_size, seed=2)
    for rank, pool in enumerate(by_spans):
        plan = plan_spans(
            geometry,
            tp_size=tp_size,
            rank=rank,
            remote_tp_size=remote_tp_size,
            local_blocks=LOCAL,
            remote_blocks=REMOTE,
        )
        for remote_rank, table in plan.items():
            copy_spans(pool, remote[remote_rank], table)
    copy_naively(geometry, naively, remote)
    for ours, expected in zip(by_spans, naively, strict=True):
        assert np.array_equal(ours, expected)


def spans_of(tp_size: int, remote_tp_size: int, rank: int = 0) -> dict[int, list[list[int]]]:
    plan = plan_spans(
        GQA,
        tp_size=tp_size,
        rank=rank,
        remote_tp_size=remote_tp_size,
        local_blocks=[7, 8, 9, 2],
        remote_blocks=[4, 5, 6, 0],
    )
    return {remote_rank: table.tolist() for remote_rank, table in plan.items()}


def test_adjacent_blocks_merge_when_whole_blocks_move() -> None:
    """Atom's own merge was never called; ours runs on every read, and the count says so."""
    block = 4 * GQA.head_block_bytes
    assert spans_of(1, 1) == {0: [[7 * block, 4 * block, 3 * block], [2 * block, 0, block]]}


@pytest.mark.parametrize(("tp_size", "remote_tp_size", "runs"), [(1, 2, 2), (2, 1, 1), (1, 4, 4), (4, 1, 1)])
def test_a_block_is_one_span_per_run_of_heads(tp_size: int, remote_tp_size: int, runs: int) -> None:
    plan = spans_of(tp_size, remote_tp_size)
    assert len(plan) == runs
    assert all(len(table) == 4 for table in plan.values())


def test_readers_of_a_replicated_latent_spread_over_the_producers_ranks() -> None:
    sources = [
        next(
            iter(plan_spans(MLA, tp_size=4, rank=rank, remote_tp_size=2, local_blocks=[0], remote_blocks=[0]))
        )
        for rank in range(4)
    ]
    assert sources == [0, 1, 0, 1]


def test_no_blocks_make_no_spans() -> None:
    plan = plan_spans(GQA, tp_size=1, rank=0, remote_tp_size=1, local_blocks=[], remote_blocks=[])
    assert all(len(table) == 0 for table in plan.values())


def test_lists_of_unequal_length_are_an_error() -> None:
    """X24: zip() would have copied the shorter and said nothing."""
    with pytest.raises(ValueError, match="2 local blocks for 1"):
        plan_spans(GQA, tp_size=1, rank=0, remote_tp_size=1, local_blocks=[1, 2], remote_blocks=[1])


@pytest.mark.parametrize(("tp_size", "rank"), [(3, 0), (6, 0), (2, 2), (2, -1)])
def test_a_split_that_does_not_come_out_even_is_an_error(tp_size: int, rank: int) -> None:
    with pytest.raises(ValueError):
        GQA.local_heads(tp_size, rank)


def test_heads_are_split_evenly_or_held_by_several_ranks() -> None:
    """As vLLM splits them."""
    assert [split_heads(8, 2, rank) for rank in range(2)] == [range(4), range(4, 8)]
    assert [split_heads(2, 4, rank) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    with pytest.raises(ValueError, match="4 KV heads cannot be split over 3 ranks"):
        split_heads(4, 3, 0)


def test_merging_needs_both_sides_adjacent() -> None:
    table = np.array([[0, 0, 8], [8, 8, 8], [16, 32, 8], [24, 40, 8], [64, 48, 8]], dtype=np.int64)
    assert merge_spans(table).tolist() == [[0, 0, 16], [16, 32, 16], [64, 48, 8]]


def test_spans_may_touch_the_ends_of_the_pools_and_there_may_be_none() -> None:
    check_bounds(np.array([[0, 192, 8], [56, 0, 8]], dtype=np.int64), [64], [200])
    check_bounds(np.empty((0, 3), dtype=np.int64), [0], [0])


@pytest.mark.parametrize(
    "span", [(57, 0, 8), (0, 193, 8), (0, 0, 65), (-1, 0, 8), (0, -1, 8), (32, 32, -8)], ids=str
)
def test_a_span_outside_either_pool_is_refused(span: tuple[int, int, int]) -> None:
    table = np.array([[0, 0, 8], span, [8, 8, 8]], dtype=np.int64)
    with pytest.raises(ValueError, match="outside"):
        check_bounds(table, [64], [200])


def test_the_fingerprint_depends_on_every_field() -> None:
    """L21: a producer and a reader that differ anywhere never exchange a byte."""
    values = {name: getattr(GQA, name) for name in KVGeometry.__struct_fields__}
    others = {
        "num_layers": 4,
        "num_kv_heads": 8,
        "head_dim": 4,
        "dtype": "bfloat16",
        "block_size": 4,
        "rope": "yarn",
        "order": "layer,block",
        "mla": True,
    }
    assert others.keys() == values.keys()
    prints = {GQA.fingerprint()}
    for name, value in others.items():
        changed = KVGeometry(**{**values, name: value})
        prints.add(changed.fingerprint())
        assert [field for field, _, _ in differences(GQA, changed)] == [name]
    assert len(prints) == 1 + len(others)
    assert all(len(each) == 16 for each in prints)


def test_block_bytes_match_the_pool() -> None:
    for geometry, heads in ((GQA, 4), (MLA, 1)):
        items = np.prod(geometry.pool_shape(1, heads))
        assert items * geometry.item_bytes == heads * geometry.head_block_bytes
