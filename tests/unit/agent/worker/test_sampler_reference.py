# SPDX-License-Identifier: Apache-2.0
"""The sampler's distributions against those of transformers' own logits processors, over random logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvferry.agent.messages.requests import SamplingParams
from kvferry.agent.worker.sampler import decision_scores, gumbel_noise
from tests.unit.agent.worker.sampling import make_token_sample

VOCABULARY = 300
EOS = (3,)
ROWS = 40

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3},
    {"temperature": 1.9},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": VOCABULARY},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 7, "top_p": 0.9, "temperature": 1.4},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.1, "temperature": 0.8},
    {"top_p": 0.6, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "top_p": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"presence_penalty": -0.4, "frequency_penalty": 0.9, "repetition_penalty": 1.2, "top_k": 25},
    {"logit_bias": {5: 3.5, 17: -100.0, 299: 0.25}},
    {"logit_bias": {token: (token % 7) - 3.0 for token in range(0, 300, 3)}, "top_p": 0.8},
    {"min_tokens": 30, "stop_token_ids": (8, 9)},
    {"min_tokens": 30, "logit_bias": {3: 100.0}, "temperature": 0.5, "top_k": 12, "top_p": 0.75},
    {"bad_words": ((5,), (17, 18)), "top_k": 40},
    # Whatever the last token is, one is banned after it, and one after two.
    {"bad_words": tuple((token, (token * 7) % VOCABULARY) for token in range(VOCABULARY)), "top_p": 0.9},
    {"bad_words": ((1, 2, 3), (4, 4), (3,)), "repetition_penalty": 1.2},
    {"allowed_token_ids": tuple(range(0, VOCABULARY, 5)), "top_p": 0.9},
    {"allowed_token_ids": (3, 7, 8), "min_tokens": 30, "stop_token_ids": (8,), "logit_bias": {4: 90.0}},
)


def reference_scores(
    logits: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingParams
) -> torch.Tensor:
    """What transformers (and OpenAI's formula for its two penalties) make of one row of logits."""
    seen = torch.tensor([[*prompt, *output]])
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, logits[None].clone())
    for token in set(output):
        count = output.count(token)
        scores[0, token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    if sampling.bad_words:  # of the output alone, as in vLLM
        banned = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words], eos_token_id=[])
        scores = banned(torch.tensor([output]), scores)
    return LogitsProcessorList(_processors(len(prompt), sampling))(seen, scores)[0]


def _processors(prompt_len: int, sampling: SamplingParams) -> Iterator[Any]:
    if sampling.logit_bias:
        yield SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()})
    if sampling.min_tokens:
        ends = [*EOS, *sampling.stop_token_ids]
        yield MinNewTokensLengthLogitsProcessor(prompt_len, sampling.min_tokens, ends, device="cpu")
    if sampling.allowed_token_ids:
        yield SuppressTokensLogitsProcessor(sorted({*range(VOCABULARY)} - {*sampling.allowed_token_ids}))
    yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield TopPLogitsWarper(sampling.top_p)
    if sampling.min_p:
        yield MinPLogitsWarper(sampling.min_p)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings) or "plain")
def test_every_distribution_is_that_of_transformers(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    sampling = SamplingParams(**{"seed": 5, "max_tokens": 90, **settings})
    logits = torch.randn((ROWS, VOCABULARY), generator=generator) * 3
    history = torch.randint(0, VOCABULARY, (ROWS, 30), generator=generator).tolist()
    rows = [
        make_token_sample(
            sampling,
            vocab_size=VOCABULARY,
            eos_ids=EOS,
            position=20,
            prompt_ids=tuple(ids[:10]),
            output_ids=tuple(ids[10:]),
        )
        for ids in history
    ]
    scores = decision_scores(logits, rows) - gumbel_noise(rows, VOCABULARY)
    for ours, raw, ids in zip(scores, logits, history, strict=True):
        expected = reference_scores(raw, ids[:10], ids[10:], sampling)
        assert torch.equal(torch.isfinite(ours), torch.isfinite(expected)), "other tokens can be sampled"
        torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1), rtol=2e-4, atol=1e-6)


def test_top_p_keeps_no_token_beyond_the_one_that_reaches_it() -> None:
    """Probabilities of exactly a quarter: two of them are 0.5, and a third is not needed."""
    logits = torch.tensor([1.0, 1.0, 1.0, 1.0])
    draw = make_token_sample(SamplingParams(seed=5, max_tokens=9, top_p=0.5), vocab_size=4)
    (ours,) = decision_scores(logits[None], [draw])
    expected = TopPLogitsWarper(0.5)(torch.zeros((1, 0)), logits[None])
    assert int(torch.isfinite(ours).sum()) == int(torch.isfinite(expected).sum()) == 2


def test_bans_that_would_leave_nothing_do_not_hold() -> None:
    sampling = SamplingParams(seed=5, max_tokens=9, min_tokens=5, allowed_token_ids=(3,), bad_words=((3,),))
    draw = make_token_sample(sampling, vocab_size=6, eos_ids=(3,))
    (ours,) = decision_scores(torch.arange(6.0)[None], [draw])
    assert torch.isfinite(ours).tolist() == [False, False, False, True, False, False]
