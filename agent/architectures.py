# SPDX-License-Identifier: Apache-2.0
"""Which models this engine serves, by architecture name, and why it refuses the others. No torch here.

The API process looks a checkpoint's config.json up before any port opens. An architecture that is in neither
table is compared with transformers' own forward first (`agent.worker.self_check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvferry.agent.checkpoint import read_json

INSTEAD = "serve it with vLLM instead (docs/engines.md)"
MAX_NAMED_TP = 64
_SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
REFUSED_STATUS = 2
"""Exit status of an agent, and of each of its processes, that refuses its model."""

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope types whose rotation of a position does not depend on the length of the sequence."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

TESTED: Mapping[str, bool] = MappingProxyType(
    {
        "CohereForCausalLM": True,
        "Ernie4_5ForCausalLM": True,
        "GPT2LMHeadModel": False,
        "GPTNeoXForCausalLM": True,
        "Gemma2ForCausalLM": True,
        "Gemma3ForCausalLM": True,
        "GemmaForCausalLM": True,
        "Glm4ForCausalLM": True,
        "GptOssForCausalLM": False,
        "GraniteForCausalLM": True,
        "LlamaForCausalLM": True,
        "MistralForCausalLM": True,
        "MixtralForCausalLM": True,
        "NemotronForCausalLM": False,
        "Olmo2ForCausalLM": True,
        "OlmoForCausalLM": True,
        "Phi3ForCausalLM": True,
        "PhiForCausalLM": True,
        "Qwen2ForCausalLM": True,
        "Qwen2MoeForCausalLM": True,
        "Qwen3ForCausalLM": True,
        "Qwen3MoeForCausalLM": True,
        "SeedOssForCausalLM": True,
        "SmolLM3ForCausalLM": True,
        "StableLmForCausalLM": False,
        "Starcoder2ForCausalLM": True,
    }
)
"""Architectures that a test compares with transformers, and whether tensor-parallel ranks can share them:
transformers has no plan for the others."""

_MLA = "its multi-head latent attention has keys and values of two sizes"
_ALIBI = "ALiBi positions are not supported"
_STATE_SPACE = "layers that keep a state instead of keys and values are not supported"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "BloomForCausalLM": _ALIBI,
        "DeepseekV2ForCausalLM": _MLA,
        "DeepseekV3ForCausalLM": _MLA,
        "FalconMambaForCausalLM": _STATE_SPACE,
        "JambaForCausalLM": _STATE_SPACE,
        "Llama4ForCausalLM": "attention within chunks is not supported",
        "Mamba2ForCausalLM": _STATE_SPACE,
        "MambaForCausalLM": _STATE_SPACE,
        "MptForCausalLM": _ALIBI,
        "Qwen3NextForCausalLM": _STATE_SPACE,
    }
)


class UnsupportedModel(ValueError):
    """The checkpoint needs something that this engine does not support."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json. Raises `BadCheckpoint`."""
    return read_json(directory / "config.json")


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the checkpoint's architecture, or its model type where it names none."""
    names = config.get("architectures") or [config.get("model_type") or "this model"]
    return str(names[0])


def is_tested(config: Mapping[str, Any]) -> bool:
    return architecture_of(config) in TESTED


def unsupported_reason(config: Mapping[str, Any], tp: int) -> str | None:
    """Return why this engine does not serve a model, or None where nothing speaks against it.

    Args:
        config: config.json as it is, or a transformers config as a dictionary.
        tp: Tensor-parallel ranks.
    """
    name = architecture_of(config)
    reason = REFUSED.get(name) or _unsupported_setting(config)
    if reason is None and tp > 1 and not TESTED.get(name, False):
        why = (
            "transformers has no tensor-parallel plan for it" if name in TESTED else "it was never tested so"
        )
        return f"{why}, but --tp 1 may do"
    return reason


def uneven_reason(config: Mapping[str, Any], tp: int) -> str | None:
    """Return why these ranks cannot share a model, and how many can; None where they can."""
    sizes = {name: config.get(name) for name in _SPLIT_SIZES}
    even = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
    name = next((name for name, size in even.items() if size % tp), None)
    if name is None:
        return None
    common = math.gcd(*even.values())
    able = ", ".join(str(each) for each in range(1, min(common, MAX_NAMED_TP) + 1) if common % each == 0)
    return f"{name} ({even[name]}) cannot be split evenly over {tp} ranks; --tp may be {able}"


def refusal(config: Mapping[str, Any], tp: int) -> str | None:
    """Return in one line why `tp` ranks do not serve a model, and what to do; None where nothing speaks
    against it.
    """
    name, reason = architecture_of(config), unsupported_reason(config, tp)
    if reason is not None:
        return refusal_line(name, reason)
    uneven = uneven_reason(config, tp)
    return None if uneven is None else f"{name}: {uneven}"


def refusal_line(architecture: str, reason: str) -> str:
    """Return the one line that a refused start ends with."""
    return f"{architecture} is not supported: {reason}; {INSTEAD}"


def _unsupported_setting(config: Mapping[str, Any]) -> str | None:
    quantization = config.get("quantization_config")
    if quantization:
        known = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", "unknown") if known else quantization
        return f"its weights are quantized ({method})"
    rope_types = _rope_types(config.get("rope_parameters") or config.get("rope_scaling"))
    if rope_types - STATIC_ROPE:
        return (
            f"rope_parameters: rope type {min(rope_types - STATIC_ROPE)!r} depends on the sequence's length"
        )
    layer_types = {str(each) for each in config.get("layer_types") or ()}
    if layer_types - LAYER_TYPES:
        return f"layer_types: layers of type {min(layer_types - LAYER_TYPES)!r} are not supported"
    return None


def _rope_types(rope: object) -> set[str]:
    """Return the rope types of all layers; some models have one for each type of layer."""
    if not isinstance(rope, Mapping):
        return set()
    own = rope.get("rope_type") or rope.get("type")
    found = {str(own)} if own else set()
    return found.union(*(_rope_types(each) for each in rope.values()))
