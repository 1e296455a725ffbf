# SPDX-License-Identifier: Apache-2.0
"""Runs steps on one rank's device: model, KV pool and sampler, without other processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from kvferry.agent.architectures import UnsupportedModel
from kvferry.agent.messages.requests import PromptLogprob, SamplingParams
from kvferry.agent.messages.steps import Chunk, SampleOutput, SamplingRow, SamplingSetup, Step, StepOutputs
from kvferry.agent.worker.attention import make_batch
from kvferry.agent.worker.model import ModelShard
from kvferry.agent.worker.sampler import Sampler, score_prompt

_WARM_UP_KEY = 0
"""The scheduler's keys begin at 1."""


class StepRunner:
    """A model and the pool that holds its KV.

    Args:
        model: This rank's share of the model.
        pool: This rank's KV, shape as `KVGeometry.pool_shape`, of the model's dtype.
        eos_ids: Tokens that end an answer.
        is_sampler: Whether this rank samples the tokens; one of the group does.
    """

    def __init__(
        self,
        model: ModelShard,
        pool: torch.Tensor,
        eos_ids: Sequence[int],
        *,
        is_sampler: bool,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sampler = Sampler(eos_ids, model.config.vocab_size) if is_sampler else None

    @torch.inference_mode()
    def run(self, step: Step, on_written: Callable[[], None]) -> StepOutputs | None:
        """Run one step, which the device has completed on return. Returns None on ranks that do not sample.

        If the step asks for it, `on_written` is called once the device has written its KV. Logits and
        sampling follow, which for a large vocabulary take as long as moving the KV does.
        """
        for source, destination in step.copies:
            self._pool[destination].copy_(self._pool[source])
        batch = make_batch(step.chunks, self._pool)
        if batch.begun_blocks is not None:
            self._pool[batch.begun_blocks] = 0

        def written() -> None:
            if step.report_written:
                self._synchronize()
                on_written()

        starts = itertools.accumulate((len(chunk.token_ids) for chunk in step.chunks), initial=0)
        rows = [
            start + row for start, chunk in zip(starts, step.chunks, strict=False) for row in chunk.logit_rows
        ]
        logits = self._model.forward(batch, rows, written)
        self._synchronize()
        if self._sampler is None:
            return None
        self._sampler.end(step.ended)
        self._sampler.begin(step.setups)
        if logits is None:
            return StepOutputs(sampled=tuple(() for _ in step.chunks))
        return _outputs(self._sampler, logits, step.chunks)

    def warm_up(self, max_model_len: int) -> None:
        """Compute a prompt and one more token: what cannot work shows now, not at the first request.

        Their KV stays in the pool's first blocks, which count as free. Every rank of a group calls this.

        Raises:
            UnsupportedModel: the model fails, or its log probabilities are not finite.
        """
        num_blocks, block_size = self._pool.shape[0], self._pool.shape[4]
        length = min(block_size, max_model_len, num_blocks * block_size - 1)
        ends = [length, length + 1] if length < max_model_len else [length]
        sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.0, logprobs=0)
        setup, start = SamplingSetup(key=_WARM_UP_KEY, sampling=sampling), 0
        for number, end in enumerate(ends):
            chunk = Chunk(
                token_ids=(0,) * (end - start),
                start=start,
                blocks=tuple(range(-(-end // block_size))),
                samples=(SamplingRow(key=_WARM_UP_KEY, choice=0, position=number),),
            )
            step = Step(number=number, copies=(), chunks=(chunk,), setups=() if number else (setup,))
            try:
                outputs = self.run(step, lambda: None)
            except (AttributeError, LookupError, RuntimeError, TypeError) as error:
                raise UnsupportedModel(f"its forward fails: {error}") from error
            for output in outputs.sampled[0] if outputs is not None else ():
                if output.logprob is None or not math.isfinite(output.logprob.logprob):
                    raise UnsupportedModel("its log probabilities are not finite")
            start = end
        if self._sampler is not None:
            self._sampler.end((_WARM_UP_KEY,))

    def _synchronize(self) -> None:
        """Wait for this step's stream, but not for the device: KV that is being pulled has its own stream."""
        if self._pool.is_cuda:
            torch.cuda.current_stream(self._pool.device).synchronize()


def _outputs(sampler: Sampler, logits: torch.Tensor, chunks: Sequence[Chunk]) -> StepOutputs:
    """Sample each chunk's tokens and score its prompt; `logits` are those of all chunks' `logit_rows`."""
    ends = list(itertools.accumulate(len(chunk.logit_rows) for chunk in chunks))
    rows = [end - 1 for end, chunk in zip(ends, chunks, strict=True) for _ in chunk.samples]
    samples = [sample for chunk in chunks for sample in chunk.samples]
    outputs: Iterator[SampleOutput] = iter(())
    if samples:
        masks = [chunk.mask for chunk in chunks for _ in chunk.samples]
        outputs = iter(sampler.sample(logits[torch.tensor(rows, device=logits.device)], samples, masks))
    scored: tuple[tuple[PromptLogprob, ...], ...] = ()
    if any(chunk.scores is not None for chunk in chunks):
        begins = [0, *ends]
        scored = tuple(
            () if chunk.scores is None else score_prompt(logits[begin:], chunk.scores)
            for begin, chunk in zip(begins, chunks, strict=False)
        )
    return StepOutputs(
        sampled=tuple(tuple(next(outputs) for _ in chunk.samples) for chunk in chunks), prompt_logprobs=scored
    )
