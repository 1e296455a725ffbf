# SPDX-License-Identifier: Apache-2.0
"""The shape of ferry-tiny, and a fresh network of that shape."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.train.vocabulary import END, PAD, SIZE

MAX_LENGTH = 2048
# With Qwen3's norms of queries and keys at 1, no score exceeds sqrt(head_dim) = 5.7: too flat to pick one
# pair among 150. Starting higher lets look-up appear within the first hundreds of steps.
FIRST_HEAD_NORM = 2.0


def config() -> Qwen3Config:
    """4 layers, 4 KV heads (TP 1, 2 and 4), tied embeddings: 0.9 million parameters, 3.6 MB in float32."""
    return Qwen3Config(
        vocab_size=SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype="float32",
    )


def fresh_network(seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised network on CPU, the same for the same seed."""
    torch.manual_seed(seed)
    network = Qwen3ForCausalLM(config())
    for layer in network.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.constant_(norm.weight, FIRST_HEAD_NORM)
    return network
