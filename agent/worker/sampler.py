# SPDX-License-Identifier: Apache-2.0
"""Samples tokens from logits so that the same request gets the same tokens wherever it runs (I4).

A token is the argmax of logits ÷ temperature + Gumbel noise in float32, and the noise is a pure function of
(seed, choice index, output position). The Gumbel-max trick makes that argmax a sample of the softmax. No
operation mixes rows, so what else is in the batch cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.bit_generator import ISeedSequence

from kvferry.agent.messages.requests import PromptLogprob, SamplingParams, TokenLogprob
from kvferry.agent.messages.steps import (
    PromptScores,
    SampleOutput,
    SamplingRow,
    SamplingSetup,
    uses_earlier_ids,
)

_UINT64 = 2**64 - 1
_SCORED_AT_ONCE = 32
"""Rows of a prompt: each takes several times the vocabulary's size in memory."""
_NOTHING_ALLOWED = "What the request allows leaves no token that could come next."


class TokenHistory:
    """The tokens of one choice so far, as vectors over the vocabulary, each made only if it is used."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.seen: torch.Tensor | None = None
        """Whether a token occurs in prompt or output; for the repetition penalty."""
        self.counts: torch.Tensor | None = None
        """How often a token occurs in the output; for presence and frequency penalties."""
        self._num_last = max((len(word) for word in sampling.bad_words), default=1) - 1
        self.last_ids: tuple[int, ...] = ()
        """The end of the output, as much of it as may be the beginning of a bad word."""
        if sampling.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(prompt_ids, dtype=torch.long)] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = torch.zeros(vocab_size)

    def add(self, output_ids: Sequence[int]) -> None:
        """Count new output tokens."""
        if not output_ids:
            return
        if self._num_last:
            self.last_ids = (*self.last_ids, *output_ids)[-self._num_last :]
        ids = torch.tensor(output_ids, dtype=torch.long)
        if self.seen is not None:
            self.seen[ids] = True
        if self.counts is not None:
            self.counts.index_add_(0, ids, torch.ones(len(output_ids)))


class RequestSampling:
    """One request's settings, with what is the same for each of its tokens prepared once."""

    def __init__(
        self,
        setup: SamplingSetup,
        eos_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self.params = setup.sampling
        self._prompt_ids = setup.prompt_ids
        self.vocab_size = vocab_size
        self._histories: dict[int, TokenHistory] = {}
        bias = {token: value for token, value in self.params.logit_bias.items() if 0 <= token < vocab_size}
        self.bias_ids = torch.tensor(list(bias), dtype=torch.long)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        banned = {*eos_ids, *self.params.stop_token_ids} if self.params.min_tokens else set()
        in_vocabulary = [token for token in banned if 0 <= token < vocab_size]
        self.banned_ids = torch.tensor(in_vocabulary, dtype=torch.long)
        """What may not be sampled before `min_tokens`."""
        allowed = [token for token in self.params.allowed_token_ids if 0 <= token < vocab_size]
        if allowed and self.params.grammar:  # which says when the answer ends
            allowed += [token for token in eos_ids if 0 <= token < vocab_size]
        self.excluded: torch.Tensor | None = None
        """bool, shape [vocabulary]: what may never be sampled; None where everything may."""
        if allowed:
            self.excluded = torch.ones(vocab_size, dtype=torch.bool)
            self.excluded[torch.tensor(allowed)] = False

    def resolve(self, row: SamplingRow, mask: bytes = b"") -> TokenSample:
        """Return what one row asks for, with the row's new tokens counted.

        `mask` are the tokens that its grammar allows, as bits; none where it has none.
        """
        history = None
        if uses_earlier_ids(self.params):
            history = self._histories.get(row.choice)
            if history is None:
                history = TokenHistory(self.params, self._prompt_ids, self.vocab_size)
                self._histories[row.choice] = history
            history.add(row.output_ids)
        return TokenSample(self, row.choice, row.position, history, mask)


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One token to be sampled: output token `position` of a choice."""

    settings: RequestSampling
    choice: int
    position: int
    history: TokenHistory | None = None
    mask: bytes = b""

    @property
    def sampling(self) -> SamplingParams:
        return self.settings.params


class Sampler:
    """Samples the tokens of steps, and keeps the settings of the requests that are under way."""

    def __init__(self, eos_ids: Sequence[int], vocab_size: int) -> None:
        """`eos_ids` are the tokens that may not come before `min_tokens`."""
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._requests: dict[int, RequestSampling] = {}

    def begin(self, setups: Iterable[SamplingSetup]) -> None:
        for setup in setups:
            self._requests[setup.key] = RequestSampling(setup, self._eos_ids, self._vocab_size)

    def end(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._requests.pop(key, None)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], masks: Sequence[bytes]
    ) -> list[SampleOutput]:
        """Sample one token per row, by the row's mask; each row's request has begun."""
        samples = [self._requests[row.key].resolve(row, mask) for row, mask in zip(rows, masks, strict=True)]
        return sample_tokens(logits, samples)


class _Key(ISeedSequence):
    """A key as it is. Philox takes one directly too, but reads the system's entropy first, for nothing."""

    def __init__(self, key: npt.NDArray[np.uint64]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[np.uint64]:
        return self._key


def gumbel_noise(samples: Sequence[TokenSample], size: int) -> torch.Tensor:
    """Standard Gumbel noise, float32, shape [len(samples), size].

    A row depends on its sample's seed, choice and position, and on nothing else. Philox is counter based
    (Salmon et al., SC 2011): the key alone fixes the whole stream, on every machine. Uniforms and logarithms
    are taken in float64 so that rounding to float32 hides differences in `log`.
    """
    uniform = np.empty((len(samples), size))
    for row, sample in zip(uniform, samples, strict=True):
        seed = sample.sampling.seed & _UINT64
        key = np.array([seed, (sample.choice << 32) | sample.position], dtype=np.uint64)
        philox = np.random.Philox(_Key(key))  # type: ignore[arg-type]  # numpy's stub lacks ISeedSequence
        np.random.Generator(philox).random(out=row)
    np.maximum(uniform, np.finfo(np.float64).tiny, out=uniform)
    return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32))


def sample_tokens(logits: torch.Tensor, samples: Sequence[TokenSample]) -> list[SampleOutput]:
    """Sample one token per row.

    Args:
        logits: float32, shape [len(samples), vocabulary], any device; it is not changed.
        samples: What to sample from each row.
    """
    plain = [index for index, sample in enumerate(samples) if _is_plain_greedy(sample)]
    outputs: list[SampleOutput | None] = [None] * len(samples)
    if plain:
        rows = logits[torch.tensor(plain, device=logits.device)]
        for index, token_id in zip(plain, rows.argmax(dim=-1).tolist(), strict=True):
            outputs[index] = SampleOutput(token_id=token_id)
    others = [index for index, output in enumerate(outputs) if output is None]
    if others:
        raw = logits[torch.tensor(others, device=logits.device)].cpu()
        sampled = _sample_rows(raw, [samples[index] for index in others])
        for index, output in zip(others, sampled, strict=True):
            outputs[index] = output
    return [output for output in outputs if output is not None]


def _changes_logits(sample: TokenSample) -> bool:
    """Whether penalties, bias or bans apply."""
    sampling = sample.sampling
    return (
        sample.position < sampling.min_tokens
        or bool(sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids or sampling.grammar)
        or uses_earlier_ids(sampling)
    )


def _is_plain_greedy(sample: TokenSample) -> bool:
    sampling = sample.sampling
    return sampling.temperature == 0.0 and sampling.logprobs is None and not _changes_logits(sample)


def _sample_rows(raw: torch.Tensor, samples: Sequence[TokenSample]) -> list[SampleOutput]:
    """Sample one token per row of `raw`. What is the same for every row is done for all of them at once."""
    scores = decision_scores(raw, samples)
    token_ids = scores.argmax(dim=-1)
    reports: list[TokenLogprob | None] = [None] * len(samples)
    wanted: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.sampling.logprobs is not None:
            wanted.setdefault(sample.sampling.logprobs, []).append(index)
    for count, indices in wanted.items():
        rows = torch.tensor(indices)
        made = _reports(raw[rows], scores[rows], token_ids[rows], count)
        for index, report in zip(indices, made, strict=True):
            reports[index] = report
    best = scores.gather(1, token_ids[:, None])[:, 0]
    return [
        SampleOutput(token_id=token_id, logprob=report, failure=_NOTHING_ALLOWED if is_stuck else "")
        for token_id, report, is_stuck in zip(
            token_ids.tolist(), reports, (best == -torch.inf).tolist(), strict=True
        )
    ]


def decision_scores(raw: torch.Tensor, samples: Sequence[TokenSample]) -> torch.Tensor:
    """Return the scores whose argmax is the sampled token, one row a sample; excluded tokens are -inf.

    Args:
        raw: float32, shape [len(samples), vocabulary], in host memory; it is not changed.

    Returns:
        float32, of the same shape.
    """
    scores = raw.clone()
    for row, sample in enumerate(samples):
        if _changes_logits(sample):
            scores[row] = _adjusted(raw[row], sample)
    random = [row for row, sample in enumerate(samples) if sample.sampling.temperature > 0.0]
    if not random:
        return scores
    random_samples, rows = [samples[row] for row in random], torch.tensor(random)
    likely = scores[rows] / torch.tensor([sample.sampling.temperature for sample in random_samples])[:, None]
    for row, sample in enumerate(random_samples):
        if _excludes(sample.sampling, raw.shape[-1]):
            likely[row] = _keep_likely(likely[row], sample.sampling)
    scores[rows] = likely + gumbel_noise(random_samples, raw.shape[-1])
    return scores


def margins(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return how far each sampled token's score lies above the best other one (inf where there is none).

    Args:
        scores: float32, shape [rows, vocabulary].
        token_ids: int64, shape [rows].
    """
    if scores.shape[-1] < 2:
        return torch.full(token_ids.shape, torch.inf)
    first, second = scores.topk(2).values.unbind(dim=-1)
    sampled = scores.gather(1, token_ids[:, None])[:, 0]
    return sampled - torch.where(sampled == first, second, first)


def _reports(
    raw: torch.Tensor, scores: torch.Tensor, token_ids: torch.Tensor, count: int
) -> Iterator[TokenLogprob]:
    """Yield log probability and margin of each row's sampled token, with the `count` likeliest of its row."""
    logprobs = torch.log_softmax(raw, dim=-1)
    top = logprobs.topk(min(count, logprobs.shape[-1]))
    sampled = logprobs.gather(1, token_ids[:, None])[:, 0]
    for logprob, margin, ids, values in zip(
        sampled.tolist(),
        margins(scores, token_ids).tolist(),
        top.indices.tolist(),
        top.values.tolist(),
        strict=True,
    ):
        yield TokenLogprob(logprob=logprob, margin=margin, top=tuple(zip(ids, values, strict=True)))


def score_prompt(logits: torch.Tensor, scores: PromptScores) -> tuple[PromptLogprob, ...]:
    """Return the log probability and the rank of each successor, by the row of the token before it.

    Args:
        logits: float32, shape [rows, vocabulary], of these rows or more, any device.
        scores: The successors, one for each of the first rows.
    """
    reports: list[PromptLogprob] = []
    for begin in range(0, len(scores.successors), _SCORED_AT_ONCE):
        ids = torch.tensor(scores.successors[begin : begin + _SCORED_AT_ONCE])
        logprobs = torch.log_softmax(logits[begin : begin + len(ids)].cpu(), dim=-1)
        own = logprobs.gather(1, ids[:, None])
        top = logprobs.topk(min(scores.num_top, logprobs.shape[-1]))
        reports += (
            PromptLogprob(logprob=logprob, rank=rank, top=tuple(zip(top_ids, values, strict=True)))
            for logprob, rank, top_ids, values in zip(
                own[:, 0].tolist(),
                ((logprobs > own).sum(dim=-1) + 1).tolist(),
                top.indices.tolist(),
                top.values.tolist(),
                strict=True,
            )
        )
    return tuple(reports)


def _adjusted(raw: torch.Tensor, sample: TokenSample) -> torch.Tensor:
    """Return logits after penalties, bias, what the request allows, bad words and bans.

    All are -inf where the request allows nothing: its grammar and its `allowed_token_ids` exclude each other.

    Presence and frequency penalties as in OpenAI's API reference, over output tokens; the repetition penalty
    as in Keskar et al. 2019 (CTRL), over prompt and output tokens.
    """
    sampling, settings, history = sample.sampling, sample.settings, sample.history
    score = raw.clone()
    if history is not None and history.seen is not None:
        penalty = sampling.repetition_penalty
        penalised = torch.where(score > 0, score / penalty, score * penalty)
        score = torch.where(history.seen, penalised, score)
    if history is not None and history.counts is not None:
        counts = history.counts
        score -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    score.index_add_(0, settings.bias_ids, settings.bias)
    if settings.excluded is not None:
        score[settings.excluded] = -torch.inf
    if sampling.grammar:
        bits = np.frombuffer(sample.mask, dtype=np.uint8)
        allowed = np.unpackbits(bits, count=len(score), bitorder="little").view(np.bool_)
        score[~torch.from_numpy(allowed)] = -torch.inf
    banned = score.clone()
    if sample.position < sampling.min_tokens:
        banned[settings.banned_ids] = -torch.inf
    if completing := _completes_bad_word(sample):
        banned[completing] = -torch.inf
    # Where bans would leave no token at all, allowed_token_ids and grammar alone hold.
    return banned if bool(banned.isfinite().any()) else score


def _completes_bad_word(sample: TokenSample) -> list[int]:
    """Return the tokens that would complete a bad word; as in vLLM, only the output counts."""
    last = () if sample.history is None else sample.history.last_ids
    return [
        word[-1]
        for word in sample.sampling.bad_words
        if word[-1] < sample.settings.vocab_size and last[len(last) - len(word) + 1 :] == word[:-1]
    ]


def _excludes(sampling: SamplingParams, vocabulary: int) -> bool:
    """Whether top_k, min_p or top_p apply."""
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _keep_likely(score: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Exclude what top_k, min_p and top_p exclude; the likeliest token always stays.

    Ties keep the lower ids, so that the kept set does not depend on how a sort breaks them.
    """
    vocabulary = score.shape[-1]
    ordered, order = score.sort(descending=True, stable=True)
    probability = torch.softmax(ordered, dim=-1)
    keep = torch.ones(vocabulary, dtype=torch.bool)
    if 0 < sampling.top_k < vocabulary:
        keep[sampling.top_k :] = False
        probability = probability / probability[: sampling.top_k].sum()
    if sampling.min_p > 0.0:
        keep &= ordered >= ordered[0] + float(np.log(sampling.min_p))
    if sampling.top_p < 1.0:
        keep &= probability.cumsum(dim=-1) - probability < sampling.top_p
    keep[0] = True
    kept = torch.full_like(score, -torch.inf)
    kept[order[keep]] = score[order[keep]]
    return kept
