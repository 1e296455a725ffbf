# SPDX-License-Identifier: Apache-2.0
"""Is a model right here? Compares the paged path with transformers' own forward, on CPU in float32.

A text goes through the paged path in chunks and token by token; transformers computes it in one plain forward
pass, of a model that it has loaded itself. Sliding windows are shortened for both, so that the text is longer
than they are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvferry.agent.architectures import UnsupportedModel
from kvferry.agent.config import AgentConfig
from kvferry.agent.messages.steps import Chunk
from kvferry.agent.worker.attention import make_batch
from kvferry.agent.worker.model import ModelShard, ModelSpec, build, read_model_config, weight_source
from kvferry.agent.worker.tensor_parallel import Group
from kvferry.agent.worker.weights import load

TOLERANCE = 1e-4
"""Greatest difference between two log probabilities of one token that is no error, in float32."""

_PROMPT_LEN = 45
_NUM_DECODED = 4
_CHUNK = 16
_WINDOW = 12
_BLOCK_SIZE = 16


def check_model(config: AgentConfig) -> None:
    """Raise UnsupportedModel unless the paged path gives transformers' log probabilities everywhere."""
    spec = ModelSpec(
        directory=Path(config.model),
        device=torch.device("cpu"),
        dtype="float32",
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        group=Group(0, 1),
        sliding_window=_WINDOW,
    )
    model = ModelShard(spec)
    length = min(_PROMPT_LEN + _NUM_DECODED, model.max_model_len)
    token_ids = random.Random(0).choices(range(model.config.vocab_size), k=length)
    own = paged_logprobs(model, token_ids)
    worst = float((own - reference_logprobs(spec, token_ids)).abs().max())
    if not worst <= TOLERANCE:  # not a number is an error too
        raise UnsupportedModel(f"its log probabilities differ by {worst:.2g} from transformers' own")


def paged_logprobs(model: ModelShard, token_ids: Sequence[int]) -> torch.Tensor:
    """Compute a text in chunks, its last tokens one by one.

    Returns:
        float32, shape [len(token_ids), vocabulary]: of what follows each token.
    """
    geometry, length = model.geometry(_BLOCK_SIZE), len(token_ids)
    num_blocks = -(-length // _BLOCK_SIZE)
    pool = torch.zeros(geometry.pool_shape(num_blocks, geometry.num_kv_heads))
    prompt_len = max(1, length - _NUM_DECODED)
    starts = [*range(0, prompt_len, _CHUNK), *range(prompt_len, length)]
    logprobs = []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        blocks = tuple(range(-(-end // _BLOCK_SIZE)))
        chunk = Chunk(token_ids=tuple(token_ids[start:end]), start=start, blocks=blocks)
        logits = model.forward(make_batch([chunk], pool), list(range(end - start)), lambda: None)
        assert logits is not None
        logprobs.append(torch.log_softmax(logits, dim=-1))
    return torch.cat(logprobs)


@torch.inference_mode()
def reference_logprobs(spec: ModelSpec, token_ids: Sequence[int]) -> torch.Tensor:
    """Compute a text with transformers alone. Returns the same shape as `paged_logprobs`."""
    config = read_model_config(spec)
    if spec.load_format == "dummy":
        causal = build(config, torch.float32, "eager", "eager")
        load(causal, weight_source(spec, config), torch.float32, spec.device)
    else:
        causal = AutoModelForCausalLM.from_pretrained(
            spec.directory,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        )
    output = causal.eval()(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    return torch.log_softmax(output.logits[0].float(), dim=-1)
