# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories without a tensor: a config and a small tokenizer, enough for the API process."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIALS = [BOS, EOS, USER, ASSISTANT]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = ["the quick brown fox jumps over the lazy dog", "aa=123;bb=456;?aa=123", "naïve café über 日本語"]


def byte_level_tokenizer() -> Tokenizer:
    """BPE over bytes, as GPT-2, Llama 3 and Qwen have it; its post-processor puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Spaces as ▁ and one token per byte for what the vocabulary lacks, as Llama 2 has it."""
    pieces = ["▁the", "▁", "a", "b", "c", "é", "▁fox", "▁▁", "�", "日"]
    vocabulary = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[],
            byte_fallback=True,
            unk_token=None,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def write_checkpoint(
    directory: Path, tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write the files that the API process reads; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size() + 3,
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    write_weights(directory / "model.safetensors")
    return directory


def write_weights(path: Path, num_bytes: int = 0) -> None:
    """Write a safetensors file with one tensor of so many bytes, or with none."""
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | ({"t": tensor} if num_bytes else {})).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
