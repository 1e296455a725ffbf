# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a decoder-only model: transformers' classes and loader, our attention and splitting."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers import initialization as transformers_initialization
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kvferry.agent.architectures import (
    TESTED,
    UnsupportedModel,
    architecture_of,
    uneven_reason,
    unsupported_reason,
)
from kvferry.agent.worker.attention import (
    ATTENTION_NAME,
    ROW_MULTIPLE,
    AttentionState,
    PagedBatch,
    register_attention,
)
from kvferry.agent.worker.tensor_parallel import Group, TensorParallelPlan
from kvferry.agent.worker.weights import CheckpointWeights, DummyWeights, WeightSource, load
from kvferry.transfer.layout import KVGeometry

EXPERTS_NAME = "kvferry_padded"

_ROTARY_TABLE_STEP = 1024
_ACTIVATION_TILE = 32768
_DUMMY_SPREAD = 0.02
_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What to load and how. `sliding_window` replaces that of the config, if it has one."""

    directory: Path
    device: torch.device
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["safetensors", "dummy"]
    max_model_len: int | None
    group: Group
    sliding_window: int | None = None


class ModelShard:
    """A model's share on this rank. Every rank calls `forward` in step."""

    def __init__(self, spec: ModelSpec) -> None:
        """Raises UnsupportedModel, or ValueError for a setting, where the model would give wrong tokens."""
        register_attention()
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, padded_experts)
        self.config = read_model_config(spec)
        check_supported(self.config, spec.group)
        self.dtype = _resolve_dtype(spec, self.config)
        self.max_model_len = _context_len(spec.max_model_len, self.config)
        source = weight_source(spec, self.config)
        self.weights_hash = source.fingerprint()
        self._state = AttentionState(self.config.num_hidden_layers, spec.group.rank, spec.group.size)
        on_cpu = spec.device.type == "cpu"
        self._causal = build(self.config, self.dtype, ATTENTION_NAME, EXPERTS_NAME if on_cpu else None)
        _check_forward(self._causal)
        plan = TensorParallelPlan(self._causal, spec.group) if spec.group.size > 1 else None
        if plan is not None:
            plan.shard(spec.device)
        load(self._causal, source, self.dtype, spec.device)
        self._causal.eval().requires_grad_(False)
        if plan is not None:
            plan.install()
        self._base = self._causal.base_model
        self._on_written: Callable[[], None] | None = None
        self._causal.get_output_embeddings().register_forward_pre_hook(self._before_head)
        _make_batch_invariant(self._base, self.max_model_len, self.dtype, spec.device)
        for module in self._base.modules():
            if hasattr(module, "layer_idx"):
                module.paged_attention_state = self._state

    def geometry(self, block_size: int) -> KVGeometry:
        """The shape of the whole model's KV."""
        config = self.config
        return KVGeometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=_num_kv_heads(config),
            head_dim=_head_dim(config),
            dtype=str(self.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            block_size=block_size,
            rope=json.dumps(getattr(config, "rope_parameters", None), sort_keys=True),
        )

    @torch.inference_mode()
    def forward(
        self, batch: PagedBatch, rows: list[int], on_written: Callable[[], None]
    ) -> torch.Tensor | None:
        """Run the model over a batch; its KV goes to the pool.

        Calls `on_written` once every layer has been launched, before the logits of `rows` are computed.

        Returns:
            float32, shape [len(rows), vocabulary], the same on every rank; None without rows.
        """
        inputs = {
            "input_ids": batch.token_ids[None],
            "position_ids": batch.positions[None],
            "attention_mask": None,
            "use_cache": False,
        }
        self._state.begin(batch)
        if not rows:
            self._base(**inputs)
            self._state.end()
            on_written()
            return None
        self._on_written = on_written
        padding = [rows[0]] * (-len(rows) % ROW_MULTIPLE)
        chosen = torch.tensor(rows + padding, device=batch.token_ids.device)
        output = self._causal(**inputs, logits_to_keep=chosen)
        if self._on_written is not None:
            raise UnsupportedModel("its logits do not come from its output embeddings")
        logits: torch.Tensor = output.logits[0, : len(rows)]
        return logits.float()

    def _before_head(self, module: nn.Module, inputs: Any) -> None:
        if self._on_written is None:
            raise UnsupportedModel("its output embeddings are used more than once")
        self._state.end()
        on_written, self._on_written = self._on_written, None
        on_written()


def read_model_config(spec: ModelSpec) -> PretrainedConfig:
    """Read a checkpoint's config. Raises UnsupportedModel for one that transformers has no class for."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(spec.directory, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModel(f"transformers cannot read its config.json: {reason}") from error
    if spec.sliding_window is not None and getattr(config, "sliding_window", None) is not None:
        config.sliding_window = spec.sliding_window
    return config


def eos_ids(directory: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of generation_config.json, else those of config.json."""
    generation = directory / "generation_config.json"
    found = GenerationConfig.from_pretrained(directory).eos_token_id if generation.is_file() else None
    found = config.eos_token_id if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def check_supported(config: PretrainedConfig, group: Group) -> None:
    """Raise `UnsupportedModel`, naming the field, for what would give wrong tokens.

    Raises ValueError for a number of ranks that cannot share the model.
    """
    settings = config.to_dict()
    reason = unsupported_reason(settings, group.size)
    if reason is not None:
        raise UnsupportedModel(reason)
    uneven = uneven_reason(settings, group.size)
    if uneven is not None:
        raise ValueError(uneven)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel("it is no causal language model of transformers")
    if config.get_text_config() is not config:
        raise UnsupportedModel("it takes more than text")
    for name in ("num_attention_heads", "num_hidden_layers", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise UnsupportedModel(f"its config has no {name}")


def weight_source(spec: ModelSpec, config: PretrainedConfig) -> WeightSource:
    if spec.load_format == "dummy":
        spread = getattr(config, "initializer_range", None) or _DUMMY_SPREAD
        return DummyWeights(config.to_json_string(), spread, spec.device)
    return CheckpointWeights(spec.directory)


def build(config: PretrainedConfig, dtype: torch.dtype, attention: str, experts: str | None) -> Any:
    """Build a model without memory. Raises UnsupportedModel when its class has no such attention."""
    with torch.device("meta"), transformers_initialization.no_tie_weights():
        try:
            # transformers leaves its factories untyped.
            return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=attention, experts_implementation=experts, dtype=dtype
            )
        except KeyError as error:
            raise UnsupportedModel("its class has an attention of its own") from error
        except (ValueError, ImportError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UnsupportedModel(f"transformers cannot build it here: {reason}") from error


def _check_forward(causal: Any) -> None:
    if not causal._supports_attention_backend and architecture_of(causal.config.to_dict()) not in TESTED:
        raise UnsupportedModel("its class has an attention of its own")
    if causal.get_output_embeddings() is None or causal.base_model is causal:
        raise UnsupportedModel("its class has no output head of its own")
    for name in ("position_ids", "logits_to_keep"):
        if name not in inspect.signature(causal.forward).parameters:
            raise UnsupportedModel(f"its forward takes no {name}")


def _num_kv_heads(config: PretrainedConfig) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _resolve_dtype(spec: ModelSpec, config: PretrainedConfig) -> torch.dtype:
    name: str = spec.dtype
    if spec.dtype == "auto":
        own = str(config.dtype or "bfloat16").removeprefix("torch.")  # a name or a torch.dtype
        name = "float32" if spec.device.type == "cpu" else own
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _context_len(asked: int | None, config: PretrainedConfig) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise UnsupportedModel("its config has no max_position_embeddings")
    if asked is not None and asked > int(limit):
        raise ValueError(f"max_model_len ({asked}) exceeds the checkpoint's own limit ({limit})")
    return asked or int(limit)


def _make_batch_invariant(base: Any, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the parts whose bits would depend on where a row lies in the batch."""
    for module in list(base.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding") and hasattr(child, "config"):
                setattr(module, name, RotaryTable(child, max_model_len, dtype, device))
            elif device.type == "cpu" and type(child).__module__ in _ACTIVATION_MODULES:
                setattr(module, name, TiledActivation(child))


class RotaryTable(nn.Module):
    """What a model's rotary embedding returns for every position, computed once; a step only looks it up.

    It is computed in runs of equal length from position 0 on, so that a position's values do not depend on
    how long the table is either. Models whose types of layers rotate differently name the type: each has a
    table.
    """

    def __init__(self, rotary: Any, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._rotary = type(rotary)(config=rotary.config)
        self._length = length
        self._dtype = dtype
        self._device = device
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        arguments = () if layer_type is None else (layer_type,)
        if arguments not in self._tables:
            self._tables[arguments] = self._compute(arguments)
        return tuple(table[position_ids] for table in self._tables[arguments])

    def _compute(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        shape = torch.empty(0, dtype=self._dtype)
        runs = []
        for start in range(0, self._length, _ROTARY_TABLE_STEP):
            positions = torch.arange(start, start + _ROTARY_TABLE_STEP)[None]
            run = self._rotary(shape, positions, *arguments)
            if not isinstance(run, tuple) or any(each.shape[:2] != positions.shape for each in run):
                raise UnsupportedModel("its rotary embedding returns something else than cosines and sines")
            runs.append(run)
        return tuple(torch.cat(parts, dim=1)[0].to(self._device) for parts in zip(*runs, strict=True))


def padded_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run a layer of experts, each over the rows that were routed to it, padded to `ROW_MULTIPLE`.

    An `experts_implementation` of transformers, for CPU: the bits of a row do not depend on how many others
    have the same expert (I4). A row's experts are added in the order of their numbers.

    Args:
        experts: A module that transformers' `use_experts_implementation` decorates.
        hidden_states: Shape [rows, hidden].
        top_k_index: int64, shape [rows, k]: each row's experts.
        top_k_weights: Shape [rows, k].

    Returns:
        Shape [rows, hidden].
    """
    output = torch.zeros_like(hidden_states)
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    for expert in sorted(set(top_k_index.flatten().tolist())):
        rows, places = torch.where(top_k_index == expert)
        padded = torch.cat((rows, rows[:1].expand(-len(rows) % ROW_MULTIPLE)))
        up = _expert_linear(experts, up_name, expert, hidden_states[padded])
        tiles = up.split(ROW_MULTIPLE)  # type: ignore[no-untyped-call]  # torch left it untyped
        activate = experts._apply_gate if experts.has_gate else experts.act_fn
        down = _expert_linear(experts, "down_proj", expert, torch.cat([activate(tile) for tile in tiles]))
        output.index_add_(0, rows, down[: len(rows)] * top_k_weights[rows, places, None].to(down.dtype))
    return output


def _expert_linear(experts: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return nn.functional.linear(rows, weight.T if experts.is_transposed else weight, bias)


class TiledActivation(nn.Module):
    """An activation applied in equal tiles, each too small to be divided among threads.

    torch's vectorised and scalar code paths can differ in the last bit (SiLU's do), and which elements are
    left to the scalar path depends on how a tensor is divided among threads, hence on the batch.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() <= _ACTIVATION_TILE:
            return self.activation(x)  # type: ignore[no-any-return]
        tiles = x.reshape(-1).split(_ACTIVATION_TILE)  # type: ignore[no-untyped-call]  # torch left it untyped
        return torch.cat([self.activation(tile) for tile in tiles]).view_as(x)
