# SPDX-License-Identifier: Apache-2.0
"""The tensors that ferry-tiny learns from spell the same prompts that its tokenizer makes of text."""

from __future__ import annotations

import re

import torch

from tools.train.batches import IGNORED, Batch, addition_batch, recall_batch
from tools.train.tasks import is_held_out
from tools.train.vocabulary import PAD, build_tokenizer

TOKENIZER = build_tokenizer()


def texts(batch: Batch) -> list[str]:
    return [
        TOKENIZER.decode([token for token in row if token != PAD], skip_special_tokens=False)
        for row in batch.ids.tolist()
    ]


def taught(batch: Batch) -> list[str]:
    rows = [[token for token in row if token != IGNORED] for row in batch.targets.tolist()]
    return [TOKENIZER.decode(row, skip_special_tokens=False) for row in rows]


def test_rows_have_the_tokens_that_the_tokenizer_gives_their_text() -> None:
    generator = torch.Generator().manual_seed(1)
    for batch in (recall_batch(generator, 64, 384), addition_batch(generator, 64)):
        for row, text in zip(batch.ids.tolist(), texts(batch), strict=True):
            assert TOKENIZER.encode(text).ids == [token for token in row if token != PAD]


def test_recall_rows_teach_the_value_of_each_asked_key() -> None:
    batch = recall_batch(torch.Generator().manual_seed(2), 64, 384)
    for text, answers in zip(texts(batch), taught(batch), strict=True):
        values = dict(re.findall(r"([a-z]{2})=(\d+);", text))
        keys = re.findall(r"\?([a-z]{2})=", text)
        right = "".join(values[key] + "<|end|>" for key in keys)
        assert right.startswith(answers)  # the row may end within an answer, or before one
        assert len(right) - len(answers) <= len("1234<|end|>")


def test_addition_rows_teach_sums_and_never_a_held_out_one() -> None:
    batch = addition_batch(torch.Generator().manual_seed(3), 4096)
    held_out = 0
    for text, answer in zip(texts(batch), taught(batch), strict=True):
        a, b = map(int, re.findall(r"\d+", text)[:2])
        held_out += is_held_out(a, b)
        assert answer == ("" if is_held_out(a, b) else f"{a + b}<|end|>")
    assert held_out > 0
