# SPDX-License-Identifier: Apache-2.0
"""Splits a model over tensor-parallel ranks, by the plan that transformers gives for it.

transformers' styles say which part of each parameter a rank holds, and its loader reads only that. The
collectives are ours: what a row-wise layer computes is summed over the ranks. On CPU every rank
sees every part and adds them in rank order: a ring's order depends on where a row lies in the batch, and so
would the bits (I4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from kvferry.agent.architectures import UnsupportedModel
from kvferry.agent.worker.shm_allgather import SLOT_BYTES, RankExchange

_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_SUMMED = frozenset({"all_reduce", "moe_tp_experts"})
_ROWWISE = frozenset({"rowwise"})
_SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
# Complete without a word to the other ranks; of some, only the gradient would need one.
_SILENT = frozenset(
    {"colwise", "packed_colwise", "packed_rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj"}
)
_STYLES = _GATHERED | _SUMMED | _ROWWISE | _SPLIT_INPUT | _SILENT
_REPLICATED = frozenset({"embedding_rowwise"})
"""Styles that are left out: a look-up needs no splitting."""


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

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.group.sum(nn.functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class TensorParallelPlan:
    """Which parameters of one model are split over a group, and what its modules exchange.

    `shard` before the weights are loaded, `install` after.
    """

    def __init__(self, model: Any, group: Group) -> None:
        """Raises UnsupportedModel when transformers has no plan for the model, or one with unknown styles."""
        self._model = model
        self._group = group
        if not model.base_model.config.base_model_tp_plan:
            raise UnsupportedModel("transformers has no tensor-parallel plan for it")
        self._styles = {name: style for name, style in model.tp_plan.items() if style not in _REPLICATED}
        self._head = model.get_output_embeddings()
        (head,) = (name for name, module in model.named_modules() if module is self._head)
        self._is_head_tied = f"{head}.weight" in model.all_tied_weights_keys
        if self._is_head_tied or self._head.weight.shape[0] % group.size:
            self._styles.pop(head, None)
        unknown = sorted({style for style in self._styles.values() if style not in _STYLES})
        if unknown:
            raise UnsupportedModel(f"tensor-parallel style {unknown[0]!r} is not supported")

    def shard(self, device: torch.device) -> None:
        """Replace parameters on the meta device by DTensors, as transformers' loader wants them.

        Raises UnsupportedModel, naming a parameter, when one does not divide evenly.
        """
        mesh = init_device_mesh(device.type, (self._group.size,))
        for name, module in self._model.named_modules():
            for own, _ in list(module.named_parameters(recurse=False)):
                full_name = f"{name}.{own}"
                style = self._style(full_name) or self._style(name)
                if style is None:
                    continue
                ALL_PARALLEL_STYLES[style].shard_param(module, own, mesh)
                parameter = module.get_parameter(own)
                if isinstance(parameter, DTensor) and not _is_even(parameter, self._group.size):
                    shape = list(parameter.shape)
                    raise UnsupportedModel(
                        f"{full_name} {shape} cannot be split evenly over {self._group.size} ranks"
                    )

    def install(self) -> None:
        """Make every parameter a plain tensor, and let the modules exchange what the plan says."""
        for module in self._model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    local = parameter.detach().to_local()
                    module.register_parameter(name, nn.Parameter(local, requires_grad=False))
        for name, module in list(self._model.named_modules()):
            style = self._style(name)
            if style is not None:
                self._install(name, module, style)
        if self._is_head_tied:
            self._install_tied_head()

    def _install_tied_head(self) -> None:
        """Make the output head a view of this rank's rows of the embedding, if they divide evenly."""
        num_rows = self._head.weight.shape[0]
        if num_rows % self._group.size == 0:
            rows = self._group.share(num_rows, "vocab_size")
            for name, parameter in list(self._head.named_parameters(recurse=False)):
                self._head.register_parameter(name, nn.Parameter(parameter.data[rows], requires_grad=False))
            self._head.register_forward_hook(partial(_concat_output, self._group))

    def _install(self, name: str, module: nn.Module, style: str) -> None:
        if style in _ROWWISE | _SPLIT_INPUT:
            if not isinstance(module, nn.Linear):
                raise UnsupportedModel(f"{name} is not a linear layer, yet its inputs are to be split")
            rowwise = RowwiseLinear(module.weight, module.bias, self._group)
            self._model.set_submodule(name, rowwise)
            if style in _SPLIT_INPUT:
                rowwise.register_forward_pre_hook(partial(_split_input, self._group))
                self._model.get_submodule(name.rpartition(".")[0]).input_is_split = True
        elif style in _GATHERED:
            module.register_forward_hook(partial(_concat_output, self._group))
        elif style in _SUMMED:
            module.register_forward_hook(partial(_sum_output, self._group))

    def _style(self, name: str) -> str | None:
        """Return the style of a module or parameter; a number in its name matches any."""
        return self._styles.get(replace_layer_number_by_wildcard(name))


def _is_even(parameter: DTensor, size: int) -> bool:
    splits = any(not placement.is_replicate() for placement in parameter.placements)
    return not splits or parameter.to_local().numel() * size == parameter.numel()


def _concat_output(group: Group, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return group.concat(output)


def _sum_output(group: Group, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return group.sum(output)


def _split_input(group: Group, module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0][..., group.share(inputs[0].shape[-1], "an input")],)
