# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV pool, plugged into transformers' models by name.

The pool is `[block, kv_head, layer, K|V, token, head_dim]` (docs/architecture.md#kv-layout): good for moving
blocks, so attention gathers a sequence's blocks of one layer into contiguous K and V first. Decoding
sequences of about one length are attended in one call: on CPU their contexts are padded to a multiple of
`CONTEXT_MULTIPLE` and masked, on GPUs, whose fast kernels take no mask, they must be equal. No sequence's
bits depend on what else is in the batch (I4), which a test checks of torch's kernel. They do depend on the
number of compute threads: for a single query torch's CPU kernel divides the keys among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvferry.agent.architectures import UnsupportedModel
from kvferry.agent.messages.steps import Chunk

ATTENTION_NAME = "kvferry_paged"

ROW_MULTIPLE = 16
"""Token rows are padded to a multiple of this: from 12 rows up a float32 `linear` on CPU gives each row the
same bits in any batch (docs/sources.md#pytorch; I4)."""

CONTEXT_MULTIPLE = 32
"""A decoding sequence's context is padded to a multiple of this on CPU: fewer calls, for few more keys. With
16 a step of 64 short sequences takes no less, with 64 a tenth more."""

GROUP_TOKENS = 4096
"""Context that is gathered for one call, over all its sequences, unless one alone has more. So the K and V of
a layer take little memory, and stay in the cache."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that are attended in one call: one chunk's, or one each of several sequences."""

    size: int
    """Sequences."""
    rows: torch.Tensor
    """int64, shape [size * queries]: their rows in the batch, sequence by sequence."""
    context_len: int
    """Keys per query."""
    kv_rows: torch.Tensor
    """int64, shape [size * 2 * kv_heads * blocks]: for each sequence, the pool rows of layer 0 with its K,
    then those with its V."""
    positions: torch.Tensor
    """int64, shape [size, queries]."""
    mask: torch.Tensor | None
    """bool, shape [queries, context_len] or [size, 1, 1, context_len], True where a query sees a key; None
    where it sees all of them."""

    def window_mask(self, window: int) -> torch.Tensor:
        """Return the mask of a layer whose queries see the last `window` keys, their own included.

        bool, shape [size, 1, queries, context_len].
        """
        keys = torch.arange(self.context_len, device=self.positions.device)
        own = self.positions[:, None, :, None]
        return (keys <= own) & (keys > own - window)


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
    begun_blocks: torch.Tensor | None
    """int64: blocks that this step begins and does not fill; None where there are none, or no context is
    padded. The rest of them must be finite: a key that is masked counts for nothing, but nothing times
    infinity is not a number."""
    groups: tuple[QueryGroup, ...]
    pool: torch.Tensor
    """Shape [block, kv_head, layer, K|V, token, head_dim], contiguous."""
    pool_rows: torch.Tensor
    """The same memory as one row per (block, kv_head, layer, K|V): gathering whole rows is the cheapest way
    to make a sequence's K and V contiguous."""
    window_masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Masks of sliding windows, by group and window: all layers with one window share them."""

    def mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Return the mask of a group in a layer with this sliding window, or with none."""
        group = self.groups[index]
        if window is None or window >= group.context_len:
            return group.mask
        if (index, window) not in self.window_masks:
            self.window_masks[index, window] = group.window_mask(window)
        return self.window_masks[index, window]


@dataclass(slots=True)
class AttentionState:
    """What the attention layers of one model share: each has it as `paged_attention_state`."""

    num_layers: int
    rank: int
    group_size: int
    batch: PagedBatch | None = None
    num_attended: int = 0
    """Layers that have stored the batch's KV."""

    def begin(self, batch: PagedBatch) -> None:
        self.batch, self.num_attended = batch, 0

    def end(self) -> None:
        """Raises UnsupportedModel when a layer has not come by, or has twice: its KV is not in the pool."""
        self.batch = None
        if self.num_attended != self.num_layers:
            raise UnsupportedModel(
                f"{self.num_attended} of its {self.num_layers} layers attend through transformers' interface"
            )


def make_batch(chunks: Sequence[Chunk], pool: torch.Tensor) -> PagedBatch:
    """Lay chunks out as rows, in order."""
    block_size, device = pool.shape[4], pool.device
    token_ids: list[int] = []
    positions: list[int] = []
    slot_blocks: list[int] = []
    begun_blocks: list[int] = []
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        if not pool.is_cuda and end % block_size and chunk.start <= end // block_size * block_size:
            begun_blocks.append(chunk.blocks[end // block_size])
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
        begun_blocks=torch.tensor(begun_blocks, device=device) if begun_blocks else None,
        groups=tuple(_groups(chunks, pool)),
        pool=pool,
        pool_rows=pool.view(-1, block_size * pool.shape[5]),
    )


def _groups(chunks: Sequence[Chunk], pool: torch.Tensor) -> Iterator[QueryGroup]:
    multiple = 1 if pool.is_cuda else CONTEXT_MULTIPLE
    singles: dict[int, list[tuple[int, Chunk]]] = {}
    row = 0
    for chunk in chunks:
        if len(chunk.token_ids) == 1:
            singles.setdefault(-(-(chunk.start + 1) // multiple) * multiple, []).append((row, chunk))
        else:
            yield _chunk_group(row, chunk, pool)
        row += len(chunk.token_ids)
    for context_len, members in singles.items():
        most = max(1, GROUP_TOKENS // context_len)
        if not pool.is_cuda and torch.get_num_threads() > 1:
            most = 1  # the keys of one query are divided among the threads, those of several are not
        for first in range(0, len(members), most):
            yield _decode_group(members[first : first + most], context_len, pool)


def _chunk_group(row: int, chunk: Chunk, pool: torch.Tensor) -> QueryGroup:
    """Make a group of the one chunk that begins at this row."""
    count = len(chunk.token_ids)
    context_len = chunk.start + count
    ones = torch.ones(count, context_len, dtype=torch.bool, device=pool.device)
    return QueryGroup(
        size=1,
        rows=torch.arange(row, row + count, device=pool.device),
        context_len=context_len,
        kv_rows=_kv_rows([chunk.blocks], pool),
        positions=torch.arange(chunk.start, context_len, device=pool.device)[None],
        mask=ones.tril(diagonal=context_len - count),
    )


def _decode_group(members: Sequence[tuple[int, Chunk]], context_len: int, pool: torch.Tensor) -> QueryGroup:
    """Group chunks of one token, given with their rows. A block table shorter than the longest is padded with
    its first block.
    """
    rows, chunks = zip(*members, strict=True)
    num_blocks = -(-context_len // pool.shape[4])
    tables = [chunk.blocks + (num_blocks - len(chunk.blocks)) * chunk.blocks[:1] for chunk in chunks]
    mask = None
    if not pool.is_cuda:
        lengths = torch.tensor([chunk.start + 1 for chunk in chunks])
        mask = (torch.arange(context_len) < lengths[:, None])[:, None, None]
    return QueryGroup(
        size=len(members),
        rows=torch.tensor(rows, device=pool.device),
        context_len=context_len,
        kv_rows=_kv_rows(tables, pool),
        positions=torch.tensor([[chunk.start] for chunk in chunks], device=pool.device),
        mask=mask,
    )


def _kv_rows(tables: Sequence[tuple[int, ...]], pool: torch.Tensor) -> torch.Tensor:
    """Return `QueryGroup.kv_rows` of block tables of one length."""
    _, heads, layers, parts, _, _ = pool.shape
    head = torch.arange(heads, device=pool.device).view(heads, 1)
    part = torch.arange(parts, device=pool.device).view(parts, 1, 1)
    blocks = torch.tensor(tables, device=pool.device)[:, None, None]
    return ((blocks * heads + head) * layers * parts + part).reshape(-1)


_WITHOUT_EFFECT = frozenset({"cache_position", "position_embeddings", "position_ids", "use_cache"})
"""What models pass on to attention and does not change its result: the batch knows positions and keys."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Store the rows' K and V in the pool, then attend every sequence over its blocks.

    Args:
        module: The attention layer; its `layer_idx` selects the pool's layer.
        query: Shape [1, heads, rows, head_dim]; `key` and `value` alike, with KV heads.
        attention_mask: Must be None; the batch knows what each query sees.
        scaling: Factor on the scores; 1/sqrt(head_dim) when not given.
        sliding_window: How many keys a query sees, its own included.
        softcap: Scores become softcap * tanh(score / softcap).
        s_aux: One score per head that takes part in the softmax and has no value.
        options: Anything else that the model passes.

    Returns:
        Shape [1, rows, heads, head_dim] (padding rows are zero), and no weights.

    Raises:
        UnsupportedModel: the model asks for something else.
    """
    state: AttentionState = module.paged_attention_state  # type: ignore[assignment]
    assert state.batch is not None, "the model was called outside of a step"
    paged = state.batch
    _check_options(attention_mask, options)
    heads, head_dim = paged.pool.shape[1], paged.pool.shape[5]
    num_queries = query.shape[1]
    first = 0
    if key.shape[1] == heads * state.group_size and getattr(module, "input_is_split", False):
        # Every rank has every head, since a norm runs over all of them. The output projection splits its
        # input: of what is returned it reads this rank's heads, and no others.
        first = state.rank * (num_queries // state.group_size)
        query = query[:, first : first + num_queries // state.group_size]
        key, value = (each[:, state.rank * heads : (state.rank + 1) * heads] for each in (key, value))
    if key.shape[1] != heads or {key.shape[3], value.shape[3]} != {head_dim}:
        shapes = f"keys of shape {tuple(key.shape[1::2])} and values of {tuple(value.shape[1::2])}"
        raise UnsupportedModel(f"it attends to {shapes}, where ({heads}, {head_dim}) was expected")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    state.num_attended += 1
    num_rows = paged.slot_blocks.shape[0]
    rows = torch.stack((key[0, :, :num_rows], value[0, :, :num_rows]), dim=2)  # [kv_head, row, K|V, dim]
    by_token = paged.pool.select(2, layer).permute(0, 3, 1, 2, 4)  # [block, token, kv_head, K|V, dim]
    by_token[paged.slot_blocks, paged.slot_offsets] = rows.transpose(0, 1)
    output = query.new_zeros((1, query.shape[2], num_queries, head_dim))
    own = output[0, :, first : first + query.shape[1]]
    scores = Scores(
        scaling=head_dim**-0.5 if scaling is None else scaling, softcap=softcap or None, sinks=s_aux
    )
    for index, group in enumerate(paged.groups):
        mask = paged.mask(index, sliding_window)
        own[group.rows] = _attend(query[0], paged, group, mask, layer, scores)
    return output, None


def _check_options(attention_mask: torch.Tensor | None, options: Mapping[str, Any]) -> None:
    if attention_mask is not None:
        raise UnsupportedModel("it makes an attention mask of its own")
    if options.get("is_causal") is False:
        raise UnsupportedModel("its attention is not causal")
    for name, value in options.items():
        if name in _WITHOUT_EFFECT or name == "is_causal" or value is None or value is False:
            continue
        if isinstance(value, torch.Tensor) or value != 0:
            raise UnsupportedModel(f"its attention has the option {name}")


@dataclass(frozen=True, slots=True)
class Scores:
    """How attention scores are made, beside the dot product."""

    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    """Shape [heads]."""


def _attend(
    query: torch.Tensor,
    paged: PagedBatch,
    group: QueryGroup,
    mask: torch.Tensor | None,
    layer: int,
    scores: Scores,
) -> torch.Tensor:
    """`query` has shape [heads, rows, head_dim]. Returns the group's rows, [rows, heads, head_dim]."""
    _, heads, _, parts, _, head_dim = paged.pool.shape
    rows = query.index_select(1, group.rows)
    per_sequence = rows.unflatten(1, (group.size, -1))  # type: ignore[no-untyped-call]  # torch left it untyped
    queries = per_sequence.transpose(0, 1).contiguous()
    gathered = paged.pool_rows.index_select(0, group.kv_rows + layer * parts)
    kv = gathered.view(group.size, parts, heads, -1, head_dim)[:, :, :, : group.context_len]
    if scores.softcap is None and scores.sinks is None:
        attended = scaled_dot_product_attention(
            queries, kv[:, 0], kv[:, 1], attn_mask=mask, scale=scores.scaling, enable_gqa=True
        )
    else:
        # One by one, so that no sequence's bits depend on how many there are.
        masks = [mask] * group.size if mask is None or mask.dim() == 2 else list(mask)
        attended = torch.stack(
            [
                _attend_explicitly(queries[index], kv[index, 0], kv[index, 1], masks[index], scores)
                for index in range(group.size)
            ]
        )
    return attended.transpose(1, 2).flatten(0, 1)


def _attend_explicitly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Attend with what torch's fused kernels do not have. Shapes [heads, queries or keys, head_dim]."""
    num_kv_heads = key.shape[0]
    by_kv_head = query.unflatten(0, (num_kv_heads, -1))  # type: ignore[no-untyped-call]
    weights = (by_kv_head @ key[:, None].transpose(-1, -2)) * scores.scaling
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    if mask is not None:
        weights = weights.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(weights.dtype).view(num_kv_heads, -1, 1, 1)
        weights = torch.cat((weights, sinks.expand(-1, -1, weights.shape[2], 1)), dim=-1)
    probabilities = torch.softmax(weights, dim=-1, dtype=torch.float32).to(value.dtype)
    return (probabilities[..., : key.shape[1]] @ value[:, None]).flatten(0, 1)


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers builds no mask: the batch brings its own."""


def register_attention() -> None:
    """Register `ATTENTION_NAME` as an `attn_implementation`. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
