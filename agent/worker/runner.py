# SPDX-License-Identifier: Apache-2.0
"""Runs steps on one rank's device: model, KV pool and sampler, and nothing that talks to other processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from kvferry.agent.worker.attention import make_batch
from kvferry.agent.worker.messages import Chunk, Drawn, Step
from kvferry.agent.worker.model import Model
from kvferry.agent.worker.sampler import draw

DrawnByChunk = tuple[tuple[Drawn, ...], ...]


class StepRunner:
    """A model and the pool that holds its KV.

    Args:
        model: This rank's share of the model.
        pool: This rank's KV, shape as `KVGeometry.pool_shape`, of the model's dtype.
        eos_ids: Tokens that end an answer.
        draws: Whether this rank draws the tokens; one of the group does.
    """

    def __init__(self, model: Model, pool: torch.Tensor, eos_ids: Sequence[int], *, draws: bool) -> None:
        self._model = model
        self._pool = pool
        self._eos_ids = eos_ids
        self._draws = draws

    @torch.inference_mode()
    def run(self, step: Step, on_written: Callable[[], None]) -> DrawnByChunk | None:
        """Run one step. On return the device has completed it. None on ranks that draw nothing.

        If the step asks for it, `on_written` is called once the device has written its KV. Logits and draws
        follow, which for a large vocabulary take as long as moving the KV does.
        """
        for source, destination in step.copies:
            self._pool[destination].copy_(self._pool[source])
        batch = make_batch(step.chunks, self._pool)
        if batch.begun_blocks is not None:
            self._pool[batch.begun_blocks] = 0
        hidden = self._model.hidden_states(batch)
        if step.tells_written:
            self._settle()
            on_written()
        ends = itertools.accumulate(len(chunk.token_ids) for chunk in step.chunks)
        sampled = [end - 1 for end, chunk in zip(ends, step.chunks, strict=True) if chunk.samples]
        logits = self._model.logits(hidden, sampled) if sampled else None
        self._settle()
        if not self._draws:
            return None
        return tuple(() for _ in step.chunks) if logits is None else self._draw(logits, step.chunks)

    def _settle(self) -> None:
        """Wait for the device, but not for all of it: KV that is being pulled has a stream of its own."""
        if self._pool.is_cuda:
            torch.cuda.current_stream(self._pool.device).synchronize()

    def _draw(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> DrawnByChunk:
        """Draw each chunk's tokens; `logits` has one row per chunk that has samples."""
        sampled = [chunk for chunk in chunks if chunk.samples]
        rows = [row for row, chunk in enumerate(sampled) for _ in chunk.samples]
        samples = [sample for chunk in sampled for sample in chunk.samples]
        drawn = iter(draw(logits[torch.tensor(rows, device=logits.device)], samples, self._eos_ids))
        return tuple(tuple(next(drawn) for _ in chunk.samples) for chunk in chunks)
