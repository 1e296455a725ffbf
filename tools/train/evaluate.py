# SPDX-License-Identifier: Apache-2.0
"""Exact match of a checkpoint on the held-out prompts: float32, CPU, greedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from tools.train.tasks import HeldOutPrompt
from tools.train.vocabulary import ASSISTANT, END, USER

LENGTH_BUCKETS = (250, 500, 750, 1000)


@dataclass(slots=True)
class Score:
    """Exact matches among prompts of one kind; the smallest lead of a right token over the runner-up."""

    asked: int = 0
    right: int = 0
    margin: float = float("inf")

    @property
    def exact_match(self) -> float:
        return self.right / self.asked


def evaluate(checkpoint: Path, prompts: Iterable[HeldOutPrompt]) -> dict[str, Score]:
    """Scores by form (raw or chat), task and, for recall, prompt length."""
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    scores: dict[str, Score] = defaultdict(Score)
    for prompt in prompts:
        for form in ("raw", "chat"):
            margin = answer_margin(model, tokenizer, prompt, chat=form == "chat")
            score = scores[f"{form} {kind(prompt)}"]
            score.asked += 1
            score.right += margin > 0
            score.margin = min(score.margin, margin if margin > 0 else score.margin)
    return dict(scores)


def kind(prompt: HeldOutPrompt) -> str:
    """Task and length bucket."""
    if prompt.task == "addition":
        return "addition"
    return f"recall <= {next(bucket for bucket in LENGTH_BUCKETS if prompt.prompt_tokens <= bucket)}"


@torch.inference_mode()
def answer_margin(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: HeldOutPrompt, *, chat: bool
) -> float:
    """Least lead, over all tokens of the answer and the end, of the right logit over the best other one.

    Feeding the answer is as good as generating it: greedy decoding gives exactly the answer if and only if
    every one of its tokens leads after the tokens before it, that is if the margin is positive.
    """
    ids = tokenizer.encode(prompt.prompt, add_special_tokens=False).ids
    ids = [USER, *ids, END, ASSISTANT] if chat else ids
    answer = [*tokenizer.encode(prompt.answer, add_special_tokens=False).ids, END]
    logits = model(torch.tensor([ids + answer[:-1]])).logits[0, len(ids) - 1 :]
    rightful = torch.tensor(answer)[:, None]
    right = logits.gather(1, rightful).squeeze(1)
    best_other = logits.scatter(1, rightful, float("-inf")).amax(dim=1)
    return float((right - best_other).min())


def report(scores: dict[str, Score]) -> Iterator[str]:
    """One line per kind."""
    for name, score in sorted(scores.items()):
        yield (
            f"{name:<20} {score.right:>3} of {score.asked:>3} right ({score.exact_match:7.2%}), "
            f"least margin {score.margin:.2f}"
        )
