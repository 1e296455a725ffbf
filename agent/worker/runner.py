# SPDX-License-Identifier: Apache-2.0
"""Runs steps on one rank's device: model, KV pool and sampler, without other processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from kvferry.agent.messages.steps import Chunk, SampleOutput, Step
from kvferry.agent.worker.attention import make_batch
from kvferry.agent.worker.model import ModelShard
from kvferry.agent.worker.sampler import Sampler

OutputsByChunk = tuple[tuple[SampleOutput, ...], ...]


class StepRunner:
    """A model and the pool that holds its KV.

    Args:
        model: This rank's share of the model.
        pool: This rank's KV, shape as `KVGeometry.pool_shape`, of the model's dtype.
        eos_ids: Tokens that end an answer.
        is_sampler: Whether this rank samples the tokens; one of the group does.
    """

    def __init__(
        self, model: ModelShard, pool: torch.Tensor, eos_ids: Sequence[int], *, is_sampler: bool
    ) -> None:
        self._model = model
        self._pool = pool
        self._sampler = Sampler(eos_ids, model.config.vocab_size) if is_sampler else None

    @torch.inference_mode()
    def run(self, step: Step, on_written: Callable[[], None]) -> OutputsByChunk | None:
        """Run one step, which the device has completed on return. Returns None on ranks that do not sample.

        If the step asks for it, `on_written` is called once the device has written its KV. Logits and
        sampling follow, which for a large vocabulary take as long as moving the KV does.
        """
        for source, destination in step.copies:
            self._pool[destination].copy_(self._pool[source])
        batch = make_batch(step.chunks, self._pool)
        if batch.begun_blocks is not None:
            self._pool[batch.begun_blocks] = 0
        hidden = self._model.hidden_states(batch)
        if step.report_written:
            self._synchronize()
            on_written()
        ends = itertools.accumulate(len(chunk.token_ids) for chunk in step.chunks)
        last_rows = [end - 1 for end, chunk in zip(ends, step.chunks, strict=True) if chunk.samples]
        logits = self._model.logits(hidden, last_rows) if last_rows else None
        self._synchronize()
        if self._sampler is None:
            return None
        self._sampler.end(step.ended)
        self._sampler.begin(step.setups)
        if logits is None:
            return tuple(() for _ in step.chunks)
        return _sample(self._sampler, logits, step.chunks)

    def _synchronize(self) -> None:
        """Wait for this step's stream, but not for the device: KV that is being pulled has its own stream."""
        if self._pool.is_cuda:
            torch.cuda.current_stream(self._pool.device).synchronize()


def _sample(sampler: Sampler, logits: torch.Tensor, chunks: Sequence[Chunk]) -> OutputsByChunk:
    """Sample each chunk's tokens; `logits` has one row per chunk that has samples."""
    with_samples = [chunk for chunk in chunks if chunk.samples]
    rows = [row for row, chunk in enumerate(with_samples) for _ in chunk.samples]
    samples = [sample for chunk in with_samples for sample in chunk.samples]
    outputs = iter(sampler.sample(logits[torch.tensor(rows, device=logits.device)], samples))
    return tuple(tuple(next(outputs) for _ in chunk.samples) for chunk in chunks)
