# SPDX-License-Identifier: Apache-2.0
"""How layers' tensors are read, in each shape in which vLLM registers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.vllm.kv_groups import LayerCache, RankShape, layer_caches
from kvferry.transfer.layout import placement_of
from tests.standins.vllm_specs import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCKS, BLOCK, DIM = 6, 8, 4
SHAPE = RankShape(tp_rank=1, tp_size=2, num_blocks=BLOCKS, model_heads=4, cache_dtype="auto")


def described(tensor: torch.Tensor, spec: Any, shape: RankShape = SHAPE) -> LayerCache:
    """One layer of a group, which must make a valid placement."""
    (layer,) = layer_caches(KVCacheGroupSpec(["layer"], spec), {"layer": tensor}, shape)
    placement_of([[layer.view]], BLOCKS)
    return layer


@pytest.mark.parametrize("dims", [(BLOCKS, 1, BLOCK, 12), (BLOCKS, BLOCK, 12)], ids=["since 0.29", "before"])
def test_a_latent_is_one_head_that_every_rank_has(dims: tuple[int, ...]) -> None:
    view = described(torch.zeros(dims), MLAAttentionSpec(BLOCK)).view
    assert (view.heads, view.total_heads, tuple(view.tensor.shape)) == (range(1), 1, (BLOCKS, 1, BLOCK, 12))


def test_a_block_may_be_several_of_the_kernels() -> None:
    tensor = torch.arange(2 * BLOCKS * 2 * 4 * DIM).view(2 * BLOCKS, 2, 4, DIM)
    view = described(tensor, FullAttentionSpec(BLOCK)).view
    assert (view.planes, view.heads) == (2, range(2, 4))
    assert torch.equal(view.tensor[3], tensor[6:8])


@pytest.mark.parametrize(
    ("local", "heads", "total"),
    [(2, range(2, 4), 4), (3, range(3, 6), 6), (1, range(1, 2), 2)],
    ids=["the model's", "more", "each rank's own"],
)
def test_heads_are_numbered_over_all_ranks(local: int, heads: range, total: int) -> None:
    """Layers of one model may have different numbers of heads."""
    view = described(torch.zeros(BLOCKS, local, BLOCK, DIM), FullAttentionSpec(BLOCK)).view
    assert (view.heads, view.total_heads) == (heads, total)


def test_a_head_that_several_ranks_have_is_one() -> None:
    shape = replace(SHAPE, tp_rank=3, tp_size=4, model_heads=2)
    view = described(torch.zeros(BLOCKS, 1, BLOCK, DIM), FullAttentionSpec(BLOCK), shape).view
    assert (view.heads, view.total_heads) == (range(1, 2), 2)


def test_a_state_is_each_ranks_own_without_its_padding() -> None:
    page = torch.zeros(BLOCKS, 64, dtype=torch.int8)
    view = described(page.as_strided((BLOCKS, 1, 1, 40), (64, 40, 40, 1)), MambaSpec(BLOCK)).view
    assert (view.heads, view.total_heads) == (range(1, 2), 2)
    (layers,) = placement_of([[view]], BLOCKS).groups[0]
    assert (layers.unit_bytes, layers.block_stride) == (40, 64)


def test_tokens_before_heads_are_whole_pages_of_each_rank() -> None:
    tensor = torch.zeros(BLOCKS, BLOCK, 2, DIM).transpose(1, 2)
    view = described(tensor, FullAttentionSpec(BLOCK)).view
    assert (view.heads, view.total_heads, view.tensor.shape[-1]) == (range(1, 2), 2, BLOCK * 2 * DIM)
    with pytest.raises(NotServed, match="has gaps"):
        described(torch.zeros(BLOCKS, BLOCK, 2, 2 * DIM)[..., :DIM].transpose(1, 2), FullAttentionSpec(BLOCK))


def test_what_a_layer_holds_differs_by_all_that_decides_it() -> None:
    tensor, pages = torch.zeros(BLOCKS, 2, BLOCK, DIM), torch.zeros(BLOCKS, BLOCK, 2, DIM).transpose(1, 2)
    layers = [
        described(tensor, FullAttentionSpec(BLOCK)),
        described(tensor, FullAttentionSpec(BLOCK, dtype="uint8")),
        described(tensor, SlidingWindowSpec(BLOCK, sliding_window=16)),
        described(tensor, SlidingWindowSpec(BLOCK, sliding_window=32)),
        described(tensor, FullAttentionSpec(BLOCK), replace(SHAPE, cache_dtype="fp8")),
        described(pages, FullAttentionSpec(BLOCK)),
    ]
    assert len({layer.content for layer in layers}) == len(layers)


def test_what_only_a_rank_or_a_server_decides_makes_no_difference() -> None:
    whole = described(
        torch.zeros(BLOCKS, 4, BLOCK, DIM), FullAttentionSpec(BLOCK, 4), replace(SHAPE, tp_rank=0, tp_size=1)
    )
    half = described(torch.zeros(BLOCKS, 2, BLOCK, DIM), FullAttentionSpec(BLOCK, 2))
    assert whole.content == half.content
    state = torch.zeros(BLOCKS, 1, 1, 40, dtype=torch.int8)
    one, other = (described(state, MambaSpec(size, num_speculative_blocks=size)) for size in (BLOCK, 1024))
    assert one.content == other.content


@pytest.mark.parametrize(
    "dims", [(BLOCKS + 1, 2, BLOCK, DIM), (2, BLOCKS, 2, BLOCK, DIM), (BLOCKS, DIM)], ids=str
)
def test_another_shape_is_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(NotServed, match="has shape"):
        described(torch.zeros(dims), FullAttentionSpec(BLOCK))
