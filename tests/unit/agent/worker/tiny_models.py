# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints, made with transformers: one of every architecture in the table of models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from kvferry.agent.messages.requests import SamplingParams
from kvferry.agent.messages.steps import Chunk, SamplingRow, SamplingSetup, Step
from kvferry.agent.worker.model import ModelShard, ModelSpec
from kvferry.agent.worker.runner import StepRunner
from kvferry.agent.worker.tensor_parallel import Group

VOCAB_SIZE = 96
BLOCK_SIZE = 16

SHAPE = {
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
_EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 32}


def _config(name: str, **changes: Any) -> PretrainedConfig:
    made: PretrainedConfig = getattr(transformers, name)(**{**SHAPE, **changes})
    return made


def _named(configs: dict[str, PretrainedConfig]) -> dict[str, PretrainedConfig]:
    """Name each architecture as a checkpoint does: transformers does so only when it saves a model."""
    for name, config in configs.items():
        config.architectures = [name]
    return configs


def make_configs() -> dict[str, PretrainedConfig]:
    """A tiny config per architecture, by name. Windows are shorter than the prompts of tests."""
    heads = {"head_dim": 16}
    windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    untied = {"tie_word_embeddings": False}
    no_groups = {"num_key_value_heads": 4}
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return {
        "CohereForCausalLM": _config("CohereConfig", logit_scale=0.25),
        "Ernie4_5ForCausalLM": _config("Ernie4_5Config", use_bias=True, **heads),
        "GPT2LMHeadModel": transformers.GPT2Config(
            vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE - 1, bos_token_id=None, initializer_range=0.3,
            **gpt2,
        ),
        "GPTNeoXForCausalLM": _config("GPTNeoXConfig", **no_groups),
        "Gemma2ForCausalLM": _config(
            "Gemma2Config", **heads, **untied, **windows, query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
        ),
        "Gemma3ForCausalLM": _config(
            "Gemma3TextConfig", **heads, **untied, **windows, query_pre_attn_scalar=20
        ),
        "GemmaForCausalLM": _config("GemmaConfig", **heads),
        "Glm4ForCausalLM": _config("Glm4Config", **heads, attention_bias=True),
        "GptOssForCausalLM": _config(
            "GptOssConfig", **heads, num_local_experts=4, num_experts_per_tok=2, **windows,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "GraniteForCausalLM": _config(
            "GraniteConfig", logits_scaling=6.0, residual_multiplier=0.3, embedding_multiplier=4.0,
            attention_multiplier=0.2,
        ),
        "LlamaForCausalLM": _config("LlamaConfig", tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE),
        "MistralForCausalLM": _config("MistralConfig", sliding_window=24),
        "MixtralForCausalLM": _config("MixtralConfig", num_local_experts=4, sliding_window=None, **_EXPERTS),
        "NemotronForCausalLM": _config("NemotronConfig"),
        "Olmo2ForCausalLM": _config("Olmo2Config"),
        "OlmoForCausalLM": _config("OlmoConfig", clip_qkv=2.0),
        "Phi3ForCausalLM": _config("Phi3Config", pad_token_id=0, sliding_window=24),
        "PhiForCausalLM": _config("PhiConfig", partial_rotary_factor=0.5),
        "Qwen2ForCausalLM": _config("Qwen2Config", tie_word_embeddings=False),
        "Qwen2MoeForCausalLM": _config(
            "Qwen2MoeConfig", num_experts=4, shared_expert_intermediate_size=64, mlp_only_layers=[1],
            **_EXPERTS,
        ),
        "Qwen3ForCausalLM": _config("Qwen3Config", head_dim=32, tie_word_embeddings=True),
        "Qwen3MoeForCausalLM": _config("Qwen3MoeConfig", head_dim=32, num_experts=4, **_EXPERTS),
        "SeedOssForCausalLM": _config("SeedOssConfig", **heads),
        "SmolLM3ForCausalLM": _config("SmolLM3Config", no_rope_layers=[1, 0]),
        "StableLmForCausalLM": _config("StableLmConfig", use_qkv_bias=True, partial_rotary_factor=0.5),
        "Starcoder2ForCausalLM": _config("Starcoder2Config", sliding_window=24),
    }  # fmt: skip


CONFIGS = _named(make_configs())


def save_checkpoint(name: str, directory: Path, *, max_shard_size: str = "5GB") -> Path:
    """Write a checkpoint with seeded random weights."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    return save_model(model, directory / name, max_shard_size=max_shard_size)


def save_model(model: Any, path: Path, *, max_shard_size: str = "5GB") -> Path:
    """Write a model, with random values also for what transformers would leave at zero or one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks", "norm.weight")):
                parameter += torch.randn(parameter.shape) * 0.2
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


Answer = list[tuple[int, float]]
"""Token ids, each with its log probability."""


@torch.inference_mode()
def reference_answer(path: Path, prompt: list[int], count: int) -> Answer:
    """What transformers' own greedy generation answers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, len(prompt) :]
    logprobs = torch.log_softmax(torch.cat(made.logits).float(), dim=-1)
    return list(zip(tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist(), strict=True))


def load_model(
    path: Path,
    group: Group | None = None,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
) -> ModelShard:
    return ModelShard(
        ModelSpec(
            directory=path,
            device=torch.device("cpu"),
            dtype="float32",
            load_format=load_format,
            max_model_len=None,
            group=group or Group(0, 1),
        )
    )


def make_pool(model: ModelShard, num_blocks: int, group: Group | None = None) -> torch.Tensor:
    """A fresh pool, full of NaN so that reading what was never written shows."""
    group = group or Group(0, 1)
    geometry = model.geometry(BLOCK_SIZE)
    heads = len(geometry.local_heads(group.size, group.rank))
    return torch.full(geometry.pool_shape(num_blocks, heads), torch.nan)


def make_runner(
    model: ModelShard, num_blocks: int, group: Group | None = None, pool: torch.Tensor | None = None
) -> StepRunner:
    """A runner over this pool, or a fresh one."""
    pool = make_pool(model, num_blocks, group) if pool is None else pool
    return StepRunner(model, pool, (VOCAB_SIZE - 1,), is_sampler=True)


def greedy_answer(
    runner: StepRunner,
    table: tuple[int, ...],
    prompt: list[int],
    count: int,
    begun: Iterable[tuple[int, float]] = (),
) -> Answer:
    """Drive a runner by hand: the prompt in chunks of 32 over the given block table, then token by token.

    With `begun`, the beginning of the answer, the runner has the KV of all but its last token already.
    """
    sampling = SamplingParams(seed=0, max_tokens=count, temperature=0.0, logprobs=0)
    setup = SamplingSetup(key=1, sampling=sampling)
    answer: Answer = list(begun)
    tokens = [*prompt, *(token for token, _ in answer)]
    done = len(tokens) - 1 if answer else 0
    while len(answer) < count:
        end = min(done + 32, len(prompt)) if done < len(prompt) else done + 1
        sample = SamplingRow(key=1, choice=0, position=len(answer))
        chunk = Chunk(
            token_ids=tuple(tokens[done:end]),
            start=done,
            blocks=table[: -(-end // BLOCK_SIZE)],
            samples=(sample,) if end == len(tokens) else (),
        )
        step = Step(number=0, copies=(), chunks=(chunk,), setups=(setup,))
        outputs = runner.run(step, lambda: None)
        assert outputs is not None
        for token in outputs.sampled[0]:
            assert token.logprob is not None
            tokens.append(token.token_id)
            answer.append((token.token_id, token.logprob.logprob))
        done = end
    return answer
