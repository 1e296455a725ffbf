# SPDX-License-Identifier: Apache-2.0
"""Splits a model's linear layers over tensor-parallel ranks, by the plan that transformers gives for it.

A column-wise layer holds some of the outputs, a row-wise one some of the inputs; what a row-wise layer
computes is summed over the ranks. On CPU every rank sees every part and adds them in rank order: a ring's
order depends on where a row lies in the batch, and so would the bits (I4).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from kvferry.agent.worker.shm_allgather import SLOT_BYTES, RankExchange

Split = Literal["colwise", "rowwise"]

_SPLITS: Mapping[str, Split | None] = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise": "rowwise",
    # Replicated on every rank: the suffix is about training, and a look-up needs no splitting.
    "replicated_with_grad_allreduce": None,
    "embedding_rowwise": None,
}


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's place among those that share a model. They communicate on CPU through `exchange`, on GPUs
    through torch.distributed.
    """

    rank: int
    size: int
    exchange: RankExchange | None = None

    def share(self, length: int, what: str) -> slice:
        """Return this rank's part of a dimension. Raises ValueError when it does not divide evenly."""
        if length % self.size:
            raise ValueError(f"{what} ({length}) cannot be split evenly over {self.size} ranks")
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum one tensor per rank, to the same bits on every rank and for every row.

        Raises RankLost when a rank has left.
        """
        if self.size == 1:
            return partial
        if self.exchange is None:
            dist.all_reduce(partial)
            return partial
        own = _rows(partial)
        total = torch.empty_like(own)
        for rows in _slots(own):
            parts = self.exchange.gather(own[rows])
            into = total[rows].view(-1)
            torch.add(parts[0], parts[1], out=into)
            for part in parts[2:]:
                into += part
        return total.view(partial.shape)

    def concat(self, part: torch.Tensor) -> torch.Tensor:
        """Join one tensor per rank along the last dimension, in rank order.

        Raises RankLost when a rank has left.
        """
        if self.size == 1:
            return part
        if self.exchange is None:
            parts = [torch.empty_like(part) for _ in range(self.size)]
            dist.all_gather(parts, part.contiguous())
            return torch.cat(parts, dim=-1)
        own = _rows(part)
        joined = own.new_empty((own.shape[0], self.size, own.shape[1]))
        for rows in _slots(own):
            for rank, each in enumerate(self.exchange.gather(own[rows])):
                joined[rows, rank] = each.view(-1, own.shape[1])
        return joined.view(*part.shape[:-1], -1)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _slots(rows: torch.Tensor) -> Iterator[slice]:
    """Yield the rows that go through the exchange at a time."""
    count, width = rows.shape
    at_once = SLOT_BYTES // (width * rows.element_size())
    return (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


class RowwiseLinear(nn.Module):
    """A linear layer that holds this rank's share of the inputs; its bias is added once, after the sum."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.group.sum(nn.functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


def splits_of(module_names: list[str], plan: Mapping[str, str]) -> dict[str, Split]:
    """Return which modules are split, and how.

    Args:
        module_names: Names relative to where the plan's patterns start.
        plan: Pattern (`*` is one number) to style, as in `base_model_tp_plan`.

    Raises:
        ValueError: the plan has a style that is not known here.
    """
    splits: dict[str, Split] = {}
    for pattern, style in plan.items():
        if style not in _SPLITS:
            raise ValueError(f"tensor-parallel style {style!r} of {pattern} is not supported")
        split = _SPLITS[style]
        if split is not None:
            regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            splits |= {name: split for name in module_names if regex.fullmatch(name)}
    return splits


def shard_dimension(parameter: str, split: Split) -> int | None:
    """Return the dimension of a split module's `weight` or `bias` that is divided; None when it is whole."""
    if split == "colwise":
        return 0
    return 1 if parameter == "weight" else None
