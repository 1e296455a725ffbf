# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV pool, plugged into transformers' models by name.

The pool is `[block, kv_head, layer, K|V, token, head_dim]` (design §7): good for moving blocks, so attention
gathers a sequence's blocks of one layer into contiguous K and V first. Each sequence is attended by itself,
in tensors of its own, so that its bits do not depend on what else is in the batch (design I4). They do depend
on the number of compute threads: for a single query torch's CPU kernel divides the keys among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agent.step import Chunk

ATTENTION_NAME = "kvferry_paged"

ROW_MULTIPLE = 16
"""Token rows are padded to a multiple of this: from 12 rows up a float32 `linear` on CPU gives each row the
same bits whatever goes with it (measured; design I4)."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Where one chunk lies in the batch, and what its queries may see."""

    start: int
    count: int
    context_len: int
    kv_rows: torch.Tensor
    """int64, shape [2 * kv_heads * blocks]: the pool rows of layer 0 that hold its K, then its V."""
    mask: torch.Tensor | None
    """bool, shape [count, context_len], True where a query sees a key; None where it sees all of them."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's tokens as rows, padded to `ROW_MULTIPLE`; padding rows touch no block."""

    token_ids: torch.Tensor
    """int64, shape [rows]."""
    positions: torch.Tensor
    """int64, shape [rows]."""
    slot_blocks: torch.Tensor
    """int64, shape [real rows]: the block that each row's KV is written to."""
    slot_offsets: torch.Tensor
    """int64, shape [real rows]: the place within that block."""
    sequences: tuple[SequenceRows, ...]
    pool: torch.Tensor
    """Shape [block, kv_head, layer, K|V, token, head_dim], contiguous."""
    pool_rows: torch.Tensor
    """The same memory as one row per (block, kv_head, layer, K|V): gathering whole rows is the cheapest way
    to make a sequence's K and V contiguous."""


def make_batch(chunks: Sequence[Chunk], pool: torch.Tensor) -> PagedBatch:
    """Lay chunks out as rows, in order."""
    block_size, device = pool.shape[4], pool.device
    token_ids: list[int] = []
    positions: list[int] = []
    slot_blocks: list[int] = []
    sequences = []
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        sequences.append(
            SequenceRows(
                start=len(token_ids),
                count=len(chunk.token_ids),
                context_len=end,
                kv_rows=_kv_rows(torch.tensor(chunk.blocks, device=device), pool.shape),
                mask=_causal_mask(len(chunk.token_ids), end, device),
            )
        )
        token_ids += chunk.token_ids
        positions += range(chunk.start, end)
        slot_blocks += [chunk.blocks[position // block_size] for position in range(chunk.start, end)]
    padding = [0] * (-len(token_ids) % ROW_MULTIPLE)
    places = torch.tensor(positions + padding, device=device)
    return PagedBatch(
        token_ids=torch.tensor(token_ids + padding, device=device),
        positions=places,
        slot_blocks=torch.tensor(slot_blocks, device=device),
        slot_offsets=places[: len(positions)] % block_size,
        sequences=tuple(sequences),
        pool=pool,
        pool_rows=pool.view(-1, block_size * pool.shape[5]),
    )


def _kv_rows(blocks: torch.Tensor, pool_shape: torch.Size) -> torch.Tensor:
    _, heads, layers, parts, _, _ = pool_shape
    head = torch.arange(heads, device=blocks.device).view(1, heads, 1)
    part = torch.arange(parts, device=blocks.device).view(parts, 1, 1)
    return ((blocks * heads + head) * layers * parts + part).reshape(-1)


def _causal_mask(count: int, context_len: int, device: torch.device) -> torch.Tensor | None:
    if count == 1:
        return None
    ones = torch.ones(count, context_len, dtype=torch.bool, device=device)
    return ones.tril(diagonal=context_len - count)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the rows' K and V in the pool, then attend each sequence over its blocks.

    Args:
        module: The attention layer; its `layer_idx` selects the pool's layer.
        query: Shape [1, heads, rows, head_dim]; `key` and `value` alike, with KV heads.
        attention_mask: Unused; the batch knows what each query sees.
        paged: The batch, passed through the model's forward by that name.
        scaling: Factor on the scores.

    Returns:
        Shape [1, rows, heads, head_dim] (padding rows are zero), and no weights.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    num_rows = paged.slot_blocks.shape[0]
    rows = torch.stack((key[0, :, :num_rows], value[0, :, :num_rows]), dim=2)  # [kv_head, row, K|V, dim]
    by_token = paged.pool.select(2, layer).permute(0, 3, 1, 2, 4)  # [block, token, kv_head, K|V, dim]
    by_token[paged.slot_blocks, paged.slot_offsets] = rows.transpose(0, 1)
    output = query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
    for sequence in paged.sequences:
        rows_of = slice(sequence.start, sequence.start + sequence.count)
        attended = _attend(query[:, :, rows_of].contiguous(), paged, sequence, layer, scaling)
        output[:, rows_of] = attended.transpose(1, 2)
    return output, None


def _attend(
    query: torch.Tensor, paged: PagedBatch, sequence: SequenceRows, layer: int, scaling: float
) -> torch.Tensor:
    _, heads, _, parts, _, head_dim = paged.pool.shape
    gathered = paged.pool_rows.index_select(0, sequence.kv_rows + layer * parts)
    key, value = gathered.view(parts, 1, heads, -1, head_dim)[:, :, :, : sequence.context_len]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=sequence.mask, scale=scaling, enable_gqa=True
    )


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers builds no mask: the batch brings its own."""


def register_attention() -> None:
    """Make `ATTENTION_NAME` usable as `attn_implementation`. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
