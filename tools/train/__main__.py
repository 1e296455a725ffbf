# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.train --out DIR`: trains ferry-tiny from scratch and writes its checkpoint directory.

Ends with status 1 when the held-out prompts of any kind are answered worse than `LEAST_EXACT_MATCH`.
Deterministic: the same device, software and arguments give the same weights.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from tools.train.batches import IGNORED, Batch, addition_batch, recall_batch
from tools.train.evaluate import evaluate, report
from tools.train.network import MAX_LENGTH, fresh_network
from tools.train.tasks import held_out_prompts
from tools.train.vocabulary import write_tokenizer

LEAST_EXACT_MATCH = 0.97
PEAK_LEARNING_RATE = 2e-3
WARM_UP_STEPS = 200
# Row widths in tokens, and the part of the training after which rows so wide appear. Look-up is learnt among
# few pairs and then stretched; all widths stay in use to the end, so that short prompts are not forgotten.
CURRICULUM = ((48, 0.0), (96, 0.08), (192, 0.14), (384, 0.2), (768, 0.28), (1056, 0.36))


def main() -> int:
    arguments = parse_arguments()
    # cuBLAS reads this when it starts; without it some of its sums depend on scheduling.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    network = fresh_network(arguments.seed).to(arguments.device)
    train(network, arguments.device, arguments.steps, arguments.tokens, arguments.seed)
    export(network, arguments.out)
    scores = evaluate(arguments.out, held_out_prompts())
    print("\n".join(report(scores)))
    return 0 if min(score.exact_match for score in scores.values()) >= LEAST_EXACT_MATCH else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of each task in one step")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(network: Qwen3ForCausalLM, device: str, steps: int, tokens: int, seed: int) -> None:
    """Trains `network` in place; each step takes one batch of either task."""
    generator = torch.Generator(device).manual_seed(seed)
    widths = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(network)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    started = time.monotonic()
    for step in range(steps):
        width = draw_width(widths, step / steps)
        recall = answer_loss(network, recall_batch(generator, max(1, tokens // width), width))
        addition = answer_loss(network, addition_batch(generator, tokens // 16))
        optimizer.zero_grad()
        (recall + addition).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step:>6} {time.monotonic() - started:7.1f} s  width {width:>4}  "
                f"loss: recall {recall.item():.4f} addition {addition.item():.4f}",
                flush=True,
            )


def make_optimizer(network: Qwen3ForCausalLM) -> torch.optim.AdamW:
    matrices = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in network.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98))


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))


def draw_width(generator: torch.Generator, progress: float) -> int:
    open_widths = [width for width, since in CURRICULUM if progress >= since]
    return open_widths[int(torch.randint(len(open_widths), (1,), generator=generator))]


def answer_loss(network: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the tokens of answers; bfloat16 matrix products on CUDA."""
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=batch.ids.is_cuda):
        logits = network(batch.ids, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED)


def export(network: Qwen3ForCausalLM, directory: Path) -> None:
    """Writes the whole checkpoint directory, weights in float32."""
    directory.mkdir(parents=True, exist_ok=True)
    network.float().cpu().save_pretrained(directory)
    write_tokenizer(directory, MAX_LENGTH)


if __name__ == "__main__":
    sys.exit(main())
