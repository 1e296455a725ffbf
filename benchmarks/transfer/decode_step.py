# SPDX-License-Identifier: Apache-2.0
"""Something that loads a GPU as one decode step of Qwen3-8B does, as a CUDA graph.

Every layer's matrix products at their true sizes, and a read of the whole batch's KV, all bound by memory.
The layers share one layer's weights and KV; both are far larger than the GPU's L2 cache, so that hides no
memory traffic.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch

LAYERS = 36
HIDDEN, INTERMEDIATE, QKV = 4096, 12288, 6144
KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
VOCABULARY = 151_936
BATCH = 64
CONTEXT = 2048
_WARM_UP = 3


class DecodeStep:
    """One captured step. `priority` is that of its stream: 0 lowest, negative higher."""

    def __init__(self, device: str, priority: int) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)
        with torch.cuda.stream(self._stream):
            weight = self._random(device)
            self._qkv, self._out = weight(HIDDEN, QKV), weight(HIDDEN, HIDDEN)
            self._gate_up, self._down = weight(HIDDEN, 2 * INTERMEDIATE), weight(INTERMEDIATE, HIDDEN)
            self._head = weight(HIDDEN, VOCABULARY)
            self._keys = weight(BATCH * KV_HEADS, HEAD_DIM, CONTEXT)
            self._values = weight(BATCH * KV_HEADS, CONTEXT, HEAD_DIM)
            self._hidden = weight(BATCH, HIDDEN)
            for _ in range(_WARM_UP):
                self._step()
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._step()

    def milliseconds(self, count: int) -> float:
        """The median of so many steps, one right after the other."""
        with torch.cuda.stream(self._stream):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            marks[0].record(self._stream)
            for mark in marks[1:]:
                self._graph.replay()
                mark.record(self._stream)
        self._stream.synchronize()
        return statistics.median(first.elapsed_time(second) for first, second in itertools.pairwise(marks))

    def _step(self) -> torch.Tensor:
        hidden = self._hidden
        for _ in range(LAYERS):
            query = (hidden @ self._qkv)[:, :HIDDEN].reshape(BATCH * KV_HEADS, GROUP, HEAD_DIM)
            attended = torch.bmm(torch.softmax(torch.bmm(query, self._keys), dim=-1), self._values)
            hidden = hidden + attended.reshape(BATCH, HIDDEN) @ self._out
            gate, up = (hidden @ self._gate_up).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ self._down
        return (hidden @ self._head).argmax(dim=-1)

    @staticmethod
    def _random(device: str) -> Callable[..., torch.Tensor]:
        generator = torch.Generator(device).manual_seed(5)

        def weight(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
            return made / shape[0] ** 0.5

        return weight
