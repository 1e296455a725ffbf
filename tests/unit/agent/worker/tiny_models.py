# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints, made with transformers, that together have all that the loader must handle."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from kvferry.agent.messages.requests import SamplingParams
from kvferry.agent.messages.steps import Chunk, SamplingRow, SamplingSetup, Step
from kvferry.agent.worker.model import ModelShard, ModelSpec
from kvferry.agent.worker.runner import StepRunner
from kvferry.agent.worker.tensor_parallel import Group

VOCAB_SIZE = 96
BLOCK_SIZE = 16

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, PretrainedConfig] = {
    # Grouped-query attention in all; untied head and scaled rope; biases; tied head and norms on q and k.
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32, tie_word_embeddings=True),
}


def save_checkpoint(name: str, directory: Path, *, max_shard_size: str = "5GB") -> Path:
    """Write a checkpoint with seeded random weights; biases too, which transformers would leave at zero."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    path = directory / name
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def reference_tokens(path: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers' own greedy generation answers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


def load_model(path: Path, group: Group | None = None) -> ModelShard:
    return ModelShard(
        ModelSpec(
            directory=path,
            device=torch.device("cpu"),
            dtype="float32",
            load_format="safetensors",
            max_model_len=None,
            group=group or Group(0, 1),
        )
    )


def make_runner(model: ModelShard, num_blocks: int, group: Group | None = None) -> StepRunner:
    """A runner over a fresh pool, full of NaN so that reading what was never written shows."""
    group = group or Group(0, 1)
    geometry = model.geometry(BLOCK_SIZE)
    heads = len(geometry.local_heads(group.size, group.rank))
    pool = torch.full(geometry.pool_shape(num_blocks, heads), torch.nan)
    return StepRunner(model, pool, (VOCAB_SIZE - 1,), is_sampler=True)


def greedy_tokens(runner: StepRunner, table: tuple[int, ...], prompt: list[int], count: int) -> list[int]:
    """Drive a runner by hand: the prompt in chunks of 32 over the given block table, then token by token."""
    sampling = SamplingParams(seed=0, max_tokens=count, temperature=0.0)
    setup = SamplingSetup(key=0, sampling=sampling)
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        end = min(done + 32, len(prompt)) if done < len(prompt) else done + 1
        sample = SamplingRow(key=0, choice=0, position=len(tokens) - len(prompt))
        chunk = Chunk(
            token_ids=tuple(tokens[done:end]),
            start=done,
            blocks=table[: -(-end // BLOCK_SIZE)],
            samples=(sample,) if end == len(tokens) else (),
        )
        step = Step(number=0, copies=(), chunks=(chunk,), setups=(setup,))
        sampled = runner.run(step, lambda: None)
        assert sampled is not None
        tokens += [token.token_id for token in sampled[0]]
        done = end
    return tokens[len(prompt) :]
