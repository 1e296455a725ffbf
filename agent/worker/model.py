# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a decoder-only model: transformers' classes, our attention, weights and splitting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from kvferry.agent.worker.attention import ATTENTION_NAME, ROW_MULTIPLE, PagedBatch, register_attention
from kvferry.agent.worker.tensor_parallel import Group, RowwiseLinear, Split, shard_dimension, splits_of
from kvferry.agent.worker.weights import CheckpointWeights, DummyWeights, WeightSource
from kvferry.transfer.layout import KVGeometry

_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_ROTARY_TABLE_STEP = 1024
_ACTIVATION_TILE = 32768


class UnsupportedModel(ValueError):
    """The checkpoint needs something that this engine does not support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What to load and how."""

    directory: Path
    device: torch.device
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["safetensors", "dummy"]
    max_model_len: int | None
    group: Group


class ModelShard:
    """A model's share on this rank. Every rank calls `hidden_states` and `logits` in step."""

    def __init__(self, spec: ModelSpec) -> None:
        register_attention()
        self.config: PretrainedConfig = AutoConfig.from_pretrained(spec.directory, local_files_only=True)
        check_supported(self.config, spec.group)
        self.dtype = _resolve_dtype(spec, self.config)
        self.max_model_len = _context_len(spec.max_model_len, self.config)
        self._group = spec.group
        source = _weight_source(spec, self.config)
        self.weights_hash = source.fingerprint()
        self._causal = _build(spec, self.config, self.dtype, source)
        self._base = self._causal.base_model
        _make_batch_invariant(self._base, self.max_model_len, self.dtype, spec.device)
        self._head_is_split = spec.group.size > 1 and self.config.vocab_size % spec.group.size == 0

    def geometry(self, block_size: int) -> KVGeometry:
        """The shape of the whole model's KV."""
        config = self.config
        return KVGeometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=_head_dim(config),
            dtype=str(self.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            block_size=block_size,
            rope=json.dumps(config.rope_parameters, sort_keys=True),
        )

    @torch.inference_mode()
    def hidden_states(self, batch: PagedBatch) -> torch.Tensor:
        """Run the decoder layers; the rows' KV goes to the pool. Returns shape [rows, hidden]."""
        output = self._base(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            attention_mask=None,
            use_cache=False,
            paged=batch,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Logits of some rows, float32, shape [len(rows), vocabulary], the same on every rank."""
        padding = [rows[0]] * (-len(rows) % ROW_MULTIPLE)
        chosen = hidden[torch.tensor(rows + padding, device=hidden.device)]
        head = self._causal.get_output_embeddings()
        logits: torch.Tensor = head(chosen)
        if self._head_is_split:
            logits = self._group.concat(logits)
        return logits[: len(rows)].float()


def eos_ids(directory: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of generation_config.json, else those of config.json."""
    generation = directory / "generation_config.json"
    found = GenerationConfig.from_pretrained(directory).eos_token_id if generation.is_file() else None
    found = config.eos_token_id if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def check_supported(config: PretrainedConfig, group: Group) -> None:
    """Raise `UnsupportedModel` or ValueError, naming the field, for what would give wrong tokens."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = layer_types != {"full_attention"}
    if windowed or (getattr(config, "sliding_window", None) and config.model_type not in ("qwen2", "qwen3")):
        raise UnsupportedModel("sliding_window: only full attention in every layer is supported")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in _STATIC_ROPE:
        raise UnsupportedModel(f"rope_parameters: rope_type {rope.get('rope_type')!r} is not supported")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        group.share(getattr(config, name), name)


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
    limit = int(config.max_position_embeddings)
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len ({asked}) exceeds the checkpoint's own limit ({limit})")
    return asked or limit


def _weight_source(spec: ModelSpec, config: PretrainedConfig) -> WeightSource:
    if spec.load_format == "dummy":
        return DummyWeights(config.to_json_string(), config.initializer_range, spec.device)
    return CheckpointWeights(spec.directory)


def _build(spec: ModelSpec, config: PretrainedConfig, dtype: torch.dtype, source: WeightSource) -> Any:
    """Build the model without memory, then give each parameter this rank's share of its values."""
    with torch.device("meta"):
        # transformers leaves its factories untyped.
        causal = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    causal.eval().requires_grad_(False)
    splits = _splits(causal, spec.group)
    tied = bool(config.tie_word_embeddings)
    for name, module in list(causal.named_modules()):
        for parameter, meta in list(module.named_parameters(recurse=False)):
            if tied and module is causal.get_output_embeddings():
                continue
            full_name = f"{name}.{parameter}"
            split = splits.get(name)
            dimension = None if split is None else shard_dimension(parameter, split)
            part = None if dimension is None else spec.group.share(meta.shape[dimension], full_name)
            values = source.read(full_name, tuple(meta.shape), dimension, part)
            values = values.to(device=spec.device, dtype=dtype)
            module.register_parameter(parameter, nn.Parameter(values, requires_grad=False))
    if tied:
        _tie(causal, splits, spec.group)
    _install_rowwise(causal, splits, spec.group)
    return causal


def _splits(causal: Any, group: Group) -> dict[str, Split]:
    if group.size == 1:
        return {}
    plan = causal.config.base_model_tp_plan
    if not plan:
        raise UnsupportedModel(f"{type(causal).__name__} has no tensor-parallel plan")
    prefix = causal.base_model_prefix
    names = [name for name, _ in causal.base_model.named_modules()]
    splits = {f"{prefix}.{name}": split for name, split in splits_of(names, plan).items()}
    if causal.config.vocab_size % group.size == 0:
        head = causal.get_output_embeddings()
        splits |= {name: "colwise" for name, module in causal.named_modules() if module is head}
    return splits


def _tie(causal: Any, splits: dict[str, Split], group: Group) -> None:
    """Make the output head a view of the embedding, of this rank's rows where the head is split."""
    head, table = causal.get_output_embeddings(), causal.get_input_embeddings().weight
    is_split = any(module is head and name in splits for name, module in causal.named_modules())
    rows = group.share(table.shape[0], "vocab_size") if is_split else slice(None)
    head.register_parameter("weight", nn.Parameter(table.data[rows], requires_grad=False))


def _install_rowwise(causal: Any, splits: dict[str, Split], group: Group) -> None:
    for name in [name for name, split in splits.items() if split == "rowwise"]:
        linear = causal.get_submodule(name)
        causal.set_submodule(name, RowwiseLinear(linear.weight, linear.bias, group))


def _make_batch_invariant(base: Any, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the parts whose bits would depend on where a row lies in the batch.

    Raises:
        UnsupportedModel: positions do not enter through a `rotary_emb` of the base model.
    """
    if not hasattr(base, "rotary_emb"):
        raise UnsupportedModel(f"{type(base).__name__} has no rotary_emb")
    base.rotary_emb = RotaryTable(type(base.rotary_emb), base.config, max_model_len, dtype, device)
    if device.type == "cpu":
        for module in base.modules():
            if isinstance(getattr(module, "act_fn", None), nn.Module):
                module.act_fn = TiledActivation(module.act_fn)


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once; a step only looks them up.

    They are computed in runs of equal length from position 0 on, so that a position's values do not depend on
    how long the table is either.
    """

    def __init__(
        self, rotary: Any, config: PretrainedConfig, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        compute = rotary(config)
        shape = torch.empty(0, dtype=dtype)
        runs = [
            compute(shape, torch.arange(start, start + _ROTARY_TABLE_STEP)[None])
            for start in range(0, length, _ROTARY_TABLE_STEP)
        ]
        cos, sin = (torch.cat(parts, dim=1)[0].to(device) for parts in zip(*runs, strict=True))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[position_ids], self.sin[position_ids]  # type: ignore[index]


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
