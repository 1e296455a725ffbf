# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that says scripts word for word: real agents then answer whatever a test needs.

GPT-2 whose next token depends on its position alone, with ferry-tiny's tokenizer. A prompt of `starts[name]`
tokens is answered by that script, and then by the end. The chat template shows the last message alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

Script = str | Sequence[Mapping[int, float]]
"""A text, or the logits of each position by token id; those of all other tokens are 0."""
EOS = 935
_VOCAB = 936
_LOGIT = 30.0
_FIRST_START = 8
_ROOM = 320
"""Positions behind the last script, for answers that go on."""
_WIDTH = 256
_TEMPLATE = (
    "{%- if tools and false %}<tool_call>{{ tools }}</tool_call>{%- endif %}"
    "{%- if false and add_generation_prompt %}<think></think>{%- endif %}{{ messages[-1].content }}"
)
"""Its marks say that the model calls as Hermes does, and thinks."""


def prompt(start: int) -> str:
    """A text of so many tokens."""
    return "1" * start


def make_parrot(directory: Path, tiny: Path, scripts: Mapping[str, Script]) -> dict[str, int]:
    """Write the checkpoint; returns how many tokens the prompt of each script has."""
    directory.mkdir(parents=True)
    shutil.copy(tiny / "tokenizer.json", directory)
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    wanted = {name: _positions(tokenizer, script) for name, script in scripts.items()}
    starts, at = {}, _FIRST_START
    for name, positions in wanted.items():
        starts[name], at = at, at + len(positions) + 1
    width = (at // _WIDTH + 1) * _WIDTH
    torch.manual_seed(0)
    wpe = torch.randn(max(at + _ROOM, 1024), width)
    wpe -= wpe.mean(-1, keepdim=True)
    wpe /= wpe.std(-1, keepdim=True, unbiased=False)
    rows, logits = [], []
    for name, positions in wanted.items():
        for offset, each in enumerate([*positions, {EOS: _LOGIT}]):
            rows.append(wpe[starts[name] - 1 + offset])
            row = torch.zeros(_VOCAB)
            for token_id, logit in each.items():
                row[token_id] = logit
            logits.append(row)
    head = torch.linalg.lstsq(torch.stack(rows).double(), torch.stack(logits).double()).solution
    _save(directory, wpe, head.T.float().contiguous())
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": len(wpe)}))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return starts


def _positions(tokenizer: Tokenizer, script: Script) -> Sequence[Mapping[int, float]]:
    if not isinstance(script, str):
        return script
    return [{token_id: _LOGIT} for token_id in tokenizer.encode(script, add_special_tokens=False).ids]


def _save(directory: Path, wpe: torch.Tensor, head: torch.Tensor) -> None:
    """Write a GPT-2 of one layer that adds nothing to the position's embedding."""
    width = wpe.shape[1]
    layer = "transformer.h.0."
    tensors = {
        "transformer.wte.weight": torch.zeros(_VOCAB, width),
        "transformer.wpe.weight": wpe,
        "lm_head.weight": head,
        **{
            f"{name}.weight": torch.ones(width)
            for name in ("transformer.ln_f", f"{layer}ln_1", f"{layer}ln_2")
        },
        **{
            f"{name}.bias": torch.zeros(width)
            for name in ("transformer.ln_f", f"{layer}ln_1", f"{layer}ln_2")
        },
    }
    for name, ins, outs in (
        ("attn.c_attn", width, 3 * width),
        ("attn.c_proj", width, width),
        ("mlp.c_fc", width, 4),
        ("mlp.c_proj", 4, width),
    ):
        tensors[f"{layer}{name}.weight"] = torch.zeros(ins, outs)
        tensors[f"{layer}{name}.bias"] = torch.zeros(outs)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": len(wpe), "n_embd": width,
        "n_layer": 1, "n_head": 4, "n_inner": 4, "vocab_size": _VOCAB, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-6, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS,
        "dtype": "float32", "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
