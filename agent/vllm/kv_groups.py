# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV-cache groups: which tokens' KV each keeps, what its layers hold, and how their tensors are read.

A group is described by its `KVCacheSpec`s (vLLM's `v1/kv_cache_interface.py`), a layer's tensor by its own
shape and strides. What a layer holds is compared as text (`LayerCache.content`), so that a spec of a later
version needs no code here: two servers agree if their specs do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.agent.plugin.settings import NotServed
from kvferry.common.hashing import Purpose, digest
from kvferry.transfer.layout import LayerView, split_heads
from kvferry.transfer.plane import BlockRun

if TYPE_CHECKING:
    import torch

_KEEP_ALL = ("FullAttentionSpec", "MLAAttentionSpec")
_KEEP_RECENT = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
_STATE = "MambaSpec"
"""Also of gated delta nets, lightning attention and short convolutions."""
_ONE_LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""What a layer keeps of a token is the same on every rank."""
_OF_A_RANK = frozenset(
    {"block_stride_alignment", "max_tp_shards", "num_head_slots", "num_kv_heads", "page_size_padded"}
)
"""Fields of a spec that say nothing of what a layer holds."""
_OF_A_SERVER = frozenset(
    {
        "block_size",
        "num_prefill_checkpoint_blocks",
        "num_speculative_blocks",
        "prefill_checkpoint_alignment",
    }
)
"""Such fields of a state's spec: without a prefix cache its block is as long as the longest context."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One group, as the scheduler sees it.

    `keeps_all`: a request has the KV of each of its tokens; else of the last ones, or the state after them.
    """

    block_size: int
    keeps_all: bool

    def end(self, num_tokens: int) -> int:
        """The position after the last block of so many tokens."""
        return -(-num_tokens // self.block_size)

    def run(self, block_ids: Sequence[int], num_tokens: int) -> BlockRun | None:
        """A prompt's blocks to its end, from the first one that is not 0; None if one is 0 in between."""
        end = self.end(num_tokens)
        kept = [position for position, block in enumerate(block_ids[:end]) if block]
        first = kept[0] if kept else end
        if len(kept) != end - first:
            return None
        return BlockRun(first, tuple(block_ids[first:end]))


def runs_of(
    groups: Sequence[KvGroup], block_ids: Sequence[Sequence[int]], num_tokens: int
) -> list[BlockRun] | None:
    """The blocks of a prompt of so many tokens, a run for each group; None if there is a hole in any."""
    runs = []
    for group, ids in zip(groups, block_ids, strict=True):
        run = group.run(ids, num_tokens)
        if run is None:
            return None
        runs.append(run)
    return runs


def groups_of(kv_cache_config: Any) -> tuple[KvGroup, ...]:
    """Raises `NotServed` for KV of a kind that is not known."""
    return tuple(_group_of(group) for group in kv_cache_config.kv_cache_groups)


def _group_of(group: Any) -> KvGroup:
    if not getattr(group, "enable_kv_transfer", True):
        raise NotServed("KV-cache groups in host memory are not served")
    kinds = {type(spec).__name__ for spec in specs_of(group).values()}
    unknown = kinds.difference(_KEEP_ALL, _KEEP_RECENT, (_STATE,))
    if unknown:
        raise NotServed(f"KV caches of the kind {', '.join(sorted(unknown))} are not served yet")
    return KvGroup(group.kv_cache_spec.block_size, kinds <= set(_KEEP_ALL))


def specs_of(group: Any) -> dict[str, Any]:
    """The specs of a group's layers, by name."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: group.kv_cache_spec if each is None else each[name] for name in group.layer_names}


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's KV on one rank, and what it holds: two servers' layers fit if the texts are equal."""

    view: LayerView
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShape:
    """What the views of a rank's KV depend on beside the tensors.

    Attributes:
        pp_rank: The pipeline stage; the views do not depend on it.
        model_heads: KV heads of the model's layers, over all ranks.
        cache_dtype: vLLM's name of the KV's format, `auto` if it is the model's.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    num_blocks: int
    model_heads: int
    cache_dtype: str

    @property
    def rank(self) -> int:
        """Among all ranks of the engine, stage by stage."""
        return self.pp_rank * self.tp_size + self.tp_rank


def layer_caches(group: Any, caches: Mapping[str, torch.Tensor], shape: RankShape) -> list[LayerCache]:
    """The layers of one group (`KVCacheGroupSpec`) that this rank has. Raises `NotServed`."""
    return [_layer_cache(name, caches[name], spec, shape) for name, spec in specs_of(group).items()]


def _layer_cache(name: str, cache: torch.Tensor, spec: Any, shape: RankShape) -> LayerCache:
    if cache.dim() == 3:  # a latent, before vLLM 0.29: [block, token, content]
        cache = cache.unsqueeze(1)
    blocks, rest = divmod(cache.shape[0], shape.num_blocks)
    if rest or not blocks or cache.dim() not in (4, 5):
        raise NotServed(
            f"the KV cache of {name} has shape {tuple(cache.shape)}: not {shape.num_blocks} blocks of "
            "[head, token, K and V]"
        )
    kind = type(spec).__name__
    # [block, plane, head, token, content]: before vLLM 0.29 GPUs have [block, K|V, token, head, dim], and
    # since then a block may be several of a kernel's.
    if cache.dim() == 5:
        view, planes, order = cache.permute(0, 1, 3, 2, 4), cache.shape[1], "kv,token,dim"
    else:
        view = cache.view(shape.num_blocks, blocks, *cache.shape[1:])
        planes, order = blocks, "token,kv,dim"
    heads, total_heads = _heads(kind, view.shape[2], shape)
    if not _is_contiguous(view[0, 0, 0]):
        view, order = _as_pages(name, view)
        heads, total_heads = range(shape.tp_rank, shape.tp_rank + 1), shape.tp_size
    return LayerCache(
        view=LayerView(
            name=digest(Purpose.VLLM_LAYER, name, size=8),
            tensor=view if planes > 1 else view[:, 0],
            planes=planes,
            heads=heads,
            total_heads=total_heads,
        ),
        content=f"{kind} {_fields(spec)} {shape.cache_dtype} {order} of {total_heads}",
    )


def _heads(kind: str, local: int, shape: RankShape) -> tuple[range, int]:
    """Which heads a rank holds, and how many there are over all ranks."""
    tp_size, rank = shape.tp_size, shape.tp_rank
    if kind in _ONE_LATENT:
        return range(1), 1
    if kind != _STATE and local == max(1, shape.model_heads // tp_size):
        return split_heads(shape.model_heads, tp_size, rank), shape.model_heads
    # A state, or a layer with other heads than the model's: each rank's share is its own.
    return range(rank * local, (rank + 1) * local), tp_size * local


def _is_contiguous(run: torch.Tensor) -> bool:
    return bool(run.is_contiguous())


def _as_pages(name: str, view: torch.Tensor) -> tuple[torch.Tensor, str]:
    """A layer whose heads lie within its tokens, as whole pages: `[block, plane, 1, 1, content]`, and the
    order of what is within.

    Raises `NotServed` if a page has gaps.
    """
    page = view[0, 0]
    dims = sorted(range(page.dim()), key=page.stride().__getitem__, reverse=True)
    if not page.permute(dims).is_contiguous():
        raise NotServed(f"the KV cache of {name} has gaps: strides {tuple(view.stride())}")
    strides = (view.stride(0), view.stride(1), page.numel(), page.numel(), 1)
    pages = view.as_strided((*view.shape[:2], 1, 1, page.numel()), strides, view.storage_offset())
    return pages, f"pages in order {dims}"


def _fields(spec: Any) -> str:
    """What a spec says of a layer's content."""
    left_out = _OF_A_RANK | (_OF_A_SERVER if type(spec).__name__ == _STATE else frozenset())
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return " ".join(f"{name}={value}" for name, value in sorted(fields.items()) if name not in left_out)
