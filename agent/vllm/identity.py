# SPDX-License-Identifier: Apache-2.0
"""What decides whether vLLM servers can use each other's KV: its shape and content, weights, the prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvferry.agent.block_hashes import hash_blocks
from kvferry.agent.plugin.identity import config_digest, files_digest, short_digest, tokenizer_digest
from kvferry.common.hashing import Purpose, digest
from kvferry.transfer.layout import ITEM_BYTES, DType, KVGeometry

MAX_ADAPTERS = 1024
_OF_THE_OUTPUT = frozenset({"max_tokens", "presence_penalty", "frequency_penalty"})
"""vLLM's names of sampling defaults that count tokens of the output."""


def geometry_of(config: Any, *, layers: Collection[str], content: str) -> KVGeometry:
    """The KV's shape over all ranks (`config` is a `VllmConfig`).

    Args:
        layers: What each layer of the model holds (`RankFacts.layers`).
        content: What else decides how KV lies within a layer's page; equal texts mean equal orders.
    """
    model = config.model_config
    plain = {"auto": str(model.dtype).removeprefix("torch.")} | {name: name for name in ITEM_BYTES}
    return KVGeometry(
        num_layers=len(layers),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype=cast(DType, plain.get(config.cache_config.cache_dtype, "uint8")),
        block_size=config.cache_config.block_size,
        rope=f"config {_config_digest(model)}",
        order=short_digest(Purpose.VLLM_LAYERS, content, *sorted(layers)),
    )


def weights_of(config: Any) -> str:
    """16 hex digits: equal for equal weights of a local checkpoint; else of its name and revision."""
    drafts = _drafts_of(config.speculative_config, config.load_config)
    return short_digest(Purpose.VLLM_WEIGHTS, _weights_of(config.model_config, config.load_config), *drafts)


def _drafts_of(speculative: Any, load: Any) -> tuple[str, ...]:
    """What decides a draft model's KV; nothing of a method that has no model."""
    model = getattr(speculative, "draft_model_config", None)
    if model is None:
        return ()
    return str(speculative.method), _weights_of(model, speculative.draft_load_config or load)


def _weights_of(model: Any, load: Any) -> str:
    # What the weights become when they are loaded.
    loaded = f"{model.quantization} {model.dtype}"
    directory = Path(model.model)
    if str(load.load_format) == "dummy":
        return short_digest(Purpose.VLLM_WEIGHTS, "dummy", loaded, _config_digest(model), str(model.seed))
    if directory.is_dir():
        return short_digest(Purpose.VLLM_WEIGHTS, "files", loaded, _files_of(directory))
    commit = getattr(model.hf_config, "_commit_hash", None)
    named = (model.model, str(model.revision), str(commit), _config_digest(model))
    return short_digest(Purpose.VLLM_WEIGHTS, "by name", loaded, *named)


def is_continuable(config: Any) -> bool:
    """Whether an answer's text and length depend on the ids of the prompt and of the tokens before, however
    many of these stand in the prompt (`config` is a `VllmConfig`).

    Not where the API reads reasoning out of a chat's text, or where the model's defaults count tokens of the
    output alone.
    """
    parts = (getattr(config, name, None) for name in ("structured_outputs_config", "reasoning_config"))
    has_parser = any(getattr(part, "reasoning_parser", "") for part in parts)
    model = config.model_config
    defaults = {name for name, value in model.get_diff_sampling_param().items() if value}
    is_harmony = getattr(model.hf_config, "model_type", "") == "gpt_oss"
    return not (has_parser or is_harmony or defaults & _OF_THE_OUTPUT)


@lru_cache(maxsize=MAX_ADAPTERS)
def adapter_of(name: str, path: str) -> str:
    """16 hex digits: equal for equal LoRA adapters of a local directory; else of their name and path.

    What is read is kept, as vLLM keeps an adapter that it has loaded under a name.
    """
    directory = Path(path)
    kind, what = ("files", _files_of(directory)) if directory.is_dir() else ("by name", path)
    return short_digest(Purpose.VLLM_ADAPTER, name, kind, what)


def prefix_hashes(request: Any, ids: Sequence[int], block_size: int) -> list[bytes]:
    """A hash of each full block of these first tokens of a request, of all that its KV depends on but for the
    weights: the tokens up to its end, the adapter and the salt.
    """
    adapter, salt = adapter_of_request(request), getattr(request, "cache_salt", None) or ""
    return hash_blocks(ids, block_size, salt=f"{len(adapter)} {adapter} {salt}")


def has_plain_ids(request: Any) -> bool:
    """Whether ids are all of the prompt: those of an image's place say nothing of the image."""
    return has_ids(request) and not getattr(request, "mm_features", None)


def has_ids(request: Any) -> bool:
    """Whether the prompt is tokens, and not embeddings."""
    return bool(request.prompt_token_ids) and getattr(request, "prompt_embeds", None) is None


def adapter_of_request(request: Any) -> str:
    """`adapter_of` a request's LoRA adapter; "" if it has none."""
    lora = getattr(request, "lora_request", None)
    return "" if lora is None else adapter_of(lora.lora_name, lora.lora_path)


def prompt_hash(request: Any, num_tokens: int) -> str:
    """A hash of all that the KV of a prompt's first tokens depends on, but for the weights."""
    ids = np.asarray(request.prompt_token_ids[:num_tokens], dtype="<i8").tobytes()
    features = (each.identifier for each in getattr(request, "mm_features", None) or ())
    return digest(Purpose.VLLM_PROMPT, ids, adapter_of_request(request), *features, size=16).hex()


def tokenizer_of(config: Any) -> str:
    """16 hex digits: equal for equal tokenizers of a local directory; else of its name and revision."""
    model = config.model_config
    return tokenizer_digest(model.tokenizer, model.tokenizer_revision, Purpose.VLLM_TOKENIZER)


def _files_of(directory: Path) -> str:
    return files_digest(directory, Purpose.VLLM_FILES)


def _config_digest(model: Any) -> str:
    return config_digest(model.hf_text_config, Purpose.VLLM_CONFIG)
