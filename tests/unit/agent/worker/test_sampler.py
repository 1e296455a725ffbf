# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.grammar.compiler import GrammarCompiler
from kvferry.agent.messages.requests import SamplingParams
from kvferry.agent.messages.steps import PromptScores, SampleOutput, SamplingRow, SamplingSetup
from kvferry.agent.worker.sampler import (
    Sampler,
    TokenSample,
    decision_scores,
    gumbel_noise,
    margins,
    sample_tokens,
    score_prompt,
)
from tests.unit.agent.worker.sampling import make_token_sample

VOCABULARY = 40
EOS = (3,)
PINNED_NOISE = [1.4470843, 0.7705508, 1.6040896, 1.5900173]
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


def make_sample(choice: int = 0, position: int = 0, **changes: Any) -> TokenSample:
    ids = {name: changes.pop(name) for name in ("prompt_ids", "output_ids") if name in changes}
    sampling = SamplingParams(**{"seed": 5, "max_tokens": 9, **changes})
    return make_token_sample(
        sampling, vocab_size=VOCABULARY, eos_ids=EOS, choice=choice, position=position, **ids
    )


def draw_one(sample: TokenSample, logits: torch.Tensor = LOGITS) -> SampleOutput:
    (sampled,) = sample_tokens(logits[None], [sample])
    return sampled


def scores_of(sample: TokenSample) -> torch.Tensor:
    (scores,) = decision_scores(LOGITS[None], [sample])
    return scores


def kept(**changes: Any) -> set[int]:
    """The tokens that can be drawn at all."""
    score = scores_of(make_sample(**changes))
    return set(torch.isfinite(score).nonzero().flatten().tolist())


def likeliest(count: int) -> set[int]:
    return set(LOGITS.topk(count).indices.tolist())


def test_noise_is_a_fixed_function_of_seed_choice_and_position() -> None:
    """The figures are part of the contract between agents: a change breaks answers that are under way."""
    key = {"seed": 2**63 - 1, "choice": 2, "position": 3}
    others = ({"seed": 1}, {"choice": 1}, {"position": 4})
    noise, *different = gumbel_noise([make_sample(**{**key, **other}) for other in ({}, *others)], size=4)
    assert noise.dtype is torch.float32
    assert noise.tolist() == pytest.approx(PINNED_NOISE, rel=1e-6)
    assert not any(torch.equal(other, noise) for other in different)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise([make_sample(seed=9)], size=200_000)
    assert noise.mean().item() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    samples = [make_sample(position=position, temperature=1.5) for position in range(4000)]
    sampled = sample_tokens(logits.expand(len(samples), -1), samples)
    counts = torch.bincount(torch.tensor([token.token_id for token in sampled]), minlength=4)
    assert torch.allclose(counts / len(samples), torch.softmax(logits / 1.5, 0), atol=0.025)


def test_a_row_s_draw_does_not_depend_on_the_other_rows() -> None:
    rows = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(2))
    samples = [
        make_sample(temperature=0.0),
        make_sample(choice=1),
        make_sample(temperature=0.7, top_p=0.8, logprobs=3),
        make_sample(temperature=0.0, logprobs=2),
        make_sample(temperature=2.0, min_p=0.1, logprobs=2),
        make_sample(frequency_penalty=0.4, output_ids=(1, 1, 2)),
    ]
    together = sample_tokens(rows, samples)
    order = [3, 0, 5, 1, 4, 2]
    assert sample_tokens(rows[order], [samples[index] for index in order]) == [
        together[index] for index in order
    ]
    assert [draw_one(sample, row) for sample, row in zip(samples, rows, strict=True)] == together


@pytest.mark.parametrize("logprobs", [None, 1])
def test_greedy_ties_go_to_the_lowest_id(logprobs: int | None) -> None:
    logits = torch.tensor([0.0, 5.0, 1.0, 5.0, 5.0])
    assert draw_one(make_sample(temperature=0.0, logprobs=logprobs), logits).token_id == 1


def test_top_k_top_p_and_min_p_keep_what_they_promise() -> None:
    assert kept() == set(range(VOCABULARY))
    assert kept(top_k=5) == likeliest(5)
    assert kept(top_k=VOCABULARY + 10) == set(range(VOCABULARY))
    assert kept(top_p=1e-9) == likeliest(1)
    probability = torch.softmax(LOGITS, 0).sort(descending=True).values.cumsum(0)
    enough = int((probability < 0.7).sum()) + 1
    assert kept(top_p=0.7) == likeliest(enough)
    floor = torch.softmax(LOGITS, 0).max() * 0.2
    assert kept(min_p=0.2) == set((torch.softmax(LOGITS, 0) >= floor).nonzero().flatten().tolist())
    assert kept(min_p=1.0) == likeliest(1)


def test_what_is_as_likely_as_min_p_asks_is_kept() -> None:
    """Ties at the edge: exp(-2) of the likeliest, and the likeliest's own equals."""
    logits = torch.tensor([0.0, -2.0, 0.0, -2.0, -2.0000002])
    edge = float(np.exp(-2.0))
    for min_p, expected in ((1.0, {0, 2}), (edge, {0, 1, 2, 3})):
        (scores,) = decision_scores(logits[None], [make_sample(min_p=min_p)])
        assert set(scores.isfinite().nonzero().flatten().tolist()) == expected


def test_penalties_move_scores_as_documented() -> None:
    base = scores_of(make_sample(temperature=0.0))
    openai = scores_of(
        make_sample(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25, output_ids=(4, 4, 9))
    )
    assert (base - openai)[[4, 9, 5]].tolist() == pytest.approx([1.25, 0.75, 0.0])
    repetition = scores_of(
        make_sample(temperature=0.0, repetition_penalty=2.0, prompt_ids=(0, 1), output_ids=(2,))
    )
    for token in (0, 1, 2):
        expected = base[token] / 2 if base[token] > 0 else base[token] * 2
        assert repetition[token] == expected
    assert torch.equal(repetition[3:], base[3:])


def test_a_bias_moves_one_token_and_unknown_ids_are_ignored() -> None:
    sample = make_sample(temperature=0.0, logit_bias={7: 100.0, -1: 1000.0, VOCABULARY: 1000.0})
    assert draw_one(sample).token_id == 7


def test_before_min_tokens_nothing_that_ends_an_answer_is_drawn() -> None:
    certain = torch.zeros(VOCABULARY)
    certain[3], certain[8], certain[11] = 50.0, 40.0, 30.0
    settings: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (8, 999)}
    assert draw_one(make_sample(position=1, **settings), certain).token_id == 11
    assert draw_one(make_sample(position=2, **settings), certain).token_id == 3


def test_logprobs_are_of_the_raw_logits_best_first() -> None:
    sampled = draw_one(make_sample(temperature=0.3, logit_bias={7: 100.0}, logprobs=4))
    expected = torch.log_softmax(LOGITS, 0)
    assert sampled.logprob is not None
    assert sampled.token_id == 7
    assert sampled.logprob.logprob == pytest.approx(expected[7].item())
    assert [token for token, _ in sampled.logprob.top] == LOGITS.topk(4).indices.tolist()
    assert [value for _, value in sampled.logprob.top] == pytest.approx(expected.topk(4).values.tolist())


def test_zero_alternatives_still_report_the_drawn_token() -> None:
    logprob = draw_one(make_sample(logprobs=0)).logprob
    assert logprob is not None
    assert logprob.top == ()


def test_the_margin_is_the_lead_over_the_second_best() -> None:
    scores = torch.tensor([[1.0, 4.0, 3.5, -torch.inf], [2.0, 2.0, 1.0, 0.0], [2.0, *[-torch.inf] * 3]])
    assert margins(scores, torch.tensor([1, 0, 0])).tolist() == [0.5, 0.0, torch.inf]
    assert margins(torch.tensor([[2.0]]), torch.tensor([0])).tolist() == [torch.inf]


def test_the_given_logits_are_not_changed() -> None:
    rows = LOGITS[None].clone()
    sample_tokens(
        rows, [make_sample(logit_bias={1: 5.0}, min_tokens=3, frequency_penalty=1.0, output_ids=(1,))]
    )
    assert torch.equal(rows[0], LOGITS)


def test_settings_come_once_and_tokens_as_they_are_new() -> None:
    """Rows that tell the tokens since the last row give what a row with all of them gives."""
    penalties: dict[str, Any] = {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 1.5},
    }
    sampling = SamplingParams(seed=5, max_tokens=9, **penalties)
    sampler = Sampler(EOS, VOCABULARY)
    sampler.begin([SamplingSetup(key=4, sampling=sampling, prompt_ids=(1, 2))])
    outputs: tuple[tuple[int, ...], ...] = ((), (9,), (9, 9, 11))
    for choice in (0, 1):
        told = 0
        for ids in outputs:
            row = SamplingRow(key=4, choice=choice, position=len(ids), output_ids=ids[told:])
            told = len(ids)
            (sampled,) = sampler.sample(LOGITS[None], [row], [b""])
            whole = make_sample(choice, len(ids), prompt_ids=(1, 2), output_ids=ids, **penalties)
            assert sampled == draw_one(whole)
    sampler.end([4])
    with pytest.raises(KeyError):
        sampler.sample(LOGITS[None], [SamplingRow(key=4, choice=0, position=0)], [b""])


class OperationCount(TorchDispatchMode):
    """How many tensor operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(  # type: ignore[override]
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_many_biases_cost_a_row_next_to_nothing() -> None:
    """D3: 300 biases and 64 choices once took a Python loop over 19,200 tensor elements in each step."""
    biased = [make_sample(choice, logit_bias=dict.fromkeys(range(VOCABULARY), 0.5)) for choice in range(64)]
    with OperationCount() as count:
        sample_tokens(LOGITS.expand(64, -1), biased)
    assert count.operations < 20 * len(biased)


def test_a_prompt_s_tokens_have_their_log_probability_rank_and_the_likeliest() -> None:
    logits = torch.randn((70, 40), generator=torch.Generator().manual_seed(3))
    successors = tuple(int(token) for token in torch.randint(40, (66,)))
    expected = torch.log_softmax(logits, dim=-1)
    reports = score_prompt(logits, PromptScores(successors=successors, num_top=3))
    assert len(reports) == len(successors)
    for row, (token, report) in enumerate(zip(successors, reports, strict=True)):
        order = expected[row].argsort(descending=True).tolist()
        assert report.logprob == float(expected[row, token])
        assert report.rank == order.index(token) + 1
        assert [token_id for token_id, _ in report.top] == order[:3]


ABC = json.dumps({"grammars": [{"lark_grammar": "start: /[abc]{2,4}/"}]})
FERRY = BUNDLED_MODELS / "ferry-tiny"
FERRY_EOS, FERRY_VOCABULARY = 935, 936
FERRY_LOGITS = torch.randn(FERRY_VOCABULARY, generator=torch.Generator().manual_seed(7)) * 2


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(FERRY, vocab_size=FERRY_VOCABULARY, eos_ids=(FERRY_EOS,))


def answer(
    grammars: GrammarCompiler, given: tuple[int, ...] = (), choice: int = 0, **changes: Any
) -> list[SampleOutput]:
    """Go on after the tokens `given`, to the end of the answer or where nothing can come next."""
    sampling = SamplingParams(**{"seed": 5, "max_tokens": 9, "grammar": ABC, **changes})
    sampler, matcher = Sampler((FERRY_EOS,), FERRY_VOCABULARY), grammars.matcher(sampling.grammar)
    sampler.begin([SamplingSetup(key=1, sampling=sampling)])
    outputs: list[SampleOutput] = []
    new, position = given, len(given)
    while len(outputs) < 9:
        row = SamplingRow(key=1, choice=choice, position=position, output_ids=new)
        matcher.add(new)
        (sampled,) = sampler.sample(FERRY_LOGITS[None], [row], [matcher.mask()])
        outputs.append(sampled)
        if sampled.failure or sampled.token_id == FERRY_EOS:
            break
        new, position = (sampled.token_id,), position + 1
    return outputs


def ids_of(outputs: Sequence[SampleOutput]) -> tuple[int, ...]:
    assert not any(each.failure for each in outputs)
    return tuple(each.token_id for each in outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_matches_its_grammar_and_goes_on_alike_anywhere(
    grammars: GrammarCompiler, temperature: float
) -> None:
    tokenizer = Tokenizer(FERRY)
    for choice in range(8):
        whole = ids_of(answer(grammars, choice=choice, temperature=temperature))
        assert whole[-1] == FERRY_EOS
        assert re.fullmatch("[abc]{2,4}", tokenizer.decode(list(whole)))
        for known in range(len(whole)):
            rest = ids_of(answer(grammars, whole[:known], choice, temperature=temperature))
            assert whole[:known] + rest == whole


def test_a_grammar_s_end_comes_before_other_wishes_and_its_excluded_tokens_after_none(
    grammars: GrammarCompiler,
) -> None:
    assert ids_of(answer(grammars, (97,) * 4, min_tokens=9)) == (FERRY_EOS,)
    letters: dict[str, Any] = {"allowed_token_ids": (97, 98, 99), "temperature": 0.0}
    assert len(ids_of(answer(grammars, min_tokens=3, logit_bias={FERRY_EOS: 100.0}, **letters))) == 3 + 1
    assert set(ids_of(answer(grammars, bad_words=((97,), (98,)), allowed_token_ids=(97, 98, 99)))) == {
        99,
        FERRY_EOS,
    }
    # No bad word at all would leave nothing: the grammar holds.
    assert len(ids_of(answer(grammars, allowed_token_ids=(97,), bad_words=((97,),)))) > 1
    biased = answer(grammars, temperature=0.0, logit_bias={100: 100.0}, logprobs=1)
    assert set(ids_of(biased)) <= {*range(FERRY_VOCABULARY)} - {100}
    (first, *_) = biased
    assert first.logprob is not None
    assert first.logprob.logprob == torch.log_softmax(FERRY_LOGITS, dim=-1)[first.token_id].item()


def test_where_nothing_may_come_next_the_answer_fails(grammars: GrammarCompiler) -> None:
    assert answer(grammars, allowed_token_ids=(120,))[0].failure
    assert answer(grammars, allowed_token_ids=(120,), logprobs=1)[0].failure
