# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights, one for each way in which vLLM keeps a model's KV.

`python -m tests.system.vllm.models DIRECTORY KIND…`, with a Python that has transformers. They have the
bundled model's tokenizer, and weights so large that an answer depends on every token of the prompt.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

WINDOW = 64
"""Tokens that a layer with a window, or of a chunk, attends to."""
_TOKENIZER = Path(__file__).parents[3] / "deploy" / "models" / "ferry-tiny"
_SCALE = 0.15
EAGLE_DRAFT = "eagle_draft"
"""Written with the kind `eagle`."""
MTP = "deepseek_mtp"
_COMMON: dict[str, Any] = {
    "vocab_size": 936,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": _SCALE,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 935,
    "pad_token_id": 932,
}
_DELTA_NETS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}
"""vLLM's CPU kernels for MLA know this size of the latent only."""
_WITHOUT_HEAD_DIM = {name: value for name, value in _COMMON.items() if name != "head_dim"}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": ("LlamaConfig", _COMMON),
        "eagle": ("LlamaConfig", {**_COMMON, "num_hidden_layers": 1}),
        "mistral": ("MistralConfig", {**_COMMON, "sliding_window": WINDOW}),
        "gemma3": (
            "Gemma3TextConfig",
            {
                **_COMMON,
                "num_hidden_layers": 6,
                "sliding_window": WINDOW,
                "query_pre_attn_scalar": 32,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            },
        ),
        "gpt_oss": (
            "GptOssConfig",
            {
                **_COMMON,
                "sliding_window": WINDOW,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": _ALTERNATING,
            },
        ),
        "llama4": (
            "Llama4TextConfig",
            {
                **_COMMON,
                "intermediate_size_mlp": 128,
                "attention_chunk_size": WINDOW,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "no_rope_layers": [1, 1, 1, 0],
            },
        ),
        "deepseek_v3": ("DeepseekV3Config", {**_WITHOUT_HEAD_DIM, **_LATENT}),
        MTP: ("DeepseekV3Config", {**_WITHOUT_HEAD_DIM, **_LATENT, "num_nextn_predict_layers": 1}),
        "nemotron_h": (
            "NemotronHConfig",
            {
                **_COMMON,
                "hybrid_override_pattern": "M*M-",
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "ssm_state_size": 32,
                "n_groups": 2,
                "conv_kernel": 4,
                "chunk_size": 32,
                "expand": 2,
            },
        ),
        "qwen3_next": (
            "Qwen3NextConfig",
            {
                **_COMMON,
                **_DELTA_NETS,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            },
        ),
    }
)


def make(directory: Path, kind: str) -> Path:
    """Write a checkpoint, the same each time, unless it is there. Returns its folder."""
    import torch
    import transformers

    target = directory / kind
    if (target / "config.json").exists():
        return target
    name, fields = KINDS[kind]
    config_class: Callable[..., Any] = getattr(transformers, name)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**fields), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.std() < 1e-6:  # some classes leave experts empty
                parameter.normal_(0, _SCALE)
        if kind == "eagle":
            tokens = model.model.embed_tokens.weight
            tokens.normal_(0, 1)
            tokens.div_(tokens.pow(2).mean(-1, keepdim=True).sqrt())
            _make_draft(model.state_dict(), directory / EAGLE_DRAFT)
    model.save_pretrained(target)
    if kind == MTP:
        _add_predictor(target / "model.safetensors", model.config.num_hidden_layers)
    folders = [target]
    if kind == "eagle":
        folders.append(directory / EAGLE_DRAFT)
        shutil.copy(target / "config.json", folders[-1])
    for folder in folders:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(_TOKENIZER / file, folder / file)
    print(json.dumps({kind: sum(each.numel() for each in model.parameters())}), flush=True)
    return target


def _make_draft(state: Mapping[str, Any], target: Path) -> None:
    """Write an EAGLE draft that predicts a target of one layer exactly, as long as its own KV is right: the
    same layer, on the embedding alone, which has RMS 1 so that the norm before the layer changes nothing.
    """
    import safetensors.torch
    import torch

    size = state["model.embed_tokens.weight"].shape[1]
    weights = {"fc.weight": torch.cat([torch.eye(size), torch.zeros(size, size)], 1)}
    for name, value in state.items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            weights[name.removeprefix("model.")] = value.clone().contiguous()
    target.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _add_predictor(file: Path, num_layers: int) -> None:
    """Add the layer that drafts the token after the next, which transformers leaves out: the last layer
    again, over the next token's embedding and the last layer's output. Its drafts are seldom right.
    """
    import safetensors.torch
    import torch

    weights = safetensors.torch.load_file(file)
    tokens, head, norm = (
        weights[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head", "model.norm")
    )
    added = {
        "embed_tokens": tokens,
        "enorm": norm,
        "hnorm": norm,
        "eh_proj": torch.eye(len(norm)).repeat(1, 2),
        "shared_head.norm": norm,
        "shared_head.head": head,
    }
    last, drafting = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    copied = {name: value for name, value in weights.items() if name.startswith(last)}
    weights |= {name.replace(last, drafting): value.clone() for name, value in copied.items()}
    weights |= {f"{drafting}{name}.weight": value.clone() for name, value in added.items()}
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    for each in sys.argv[2:]:
        make(Path(sys.argv[1]), each)
