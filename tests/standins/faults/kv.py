# SPDX-License-Identifier: Apache-2.0
"""KV that a rank writes wrongly, as field reports describe it, and knows nothing of.

zero_layer  one layer's KV is zero
swap_kv     K and V of one head are exchanged
rope        positions are off by one block
stale       the first block is that of the prompt before, as of a prefix cache that mistakes one for another
late_rank   the second rank's last block is not written yet
bad_byte    one of 1,000 blocks has a flipped bit in one element's top byte
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args
from unittest import mock

import torch

from kvferry.agent.messages.steps import Chunk, Step
from kvferry.agent.worker.model import ModelShard
from kvferry.agent.worker.runner import StepRunner

KvFault = Literal["zero_layer", "swap_kv", "rope", "stale", "late_rank", "bad_byte"]
Spoil = Callable[[torch.Tensor, Chunk], None]
FLIPPED_BIT = 0x40
BLOCKS_PER_BAD_BYTE = 1000


@contextmanager
def injected(fault: str | None, rank: int) -> Iterator[None]:
    """Have the ranks that run meanwhile write wrong KV. Raises ValueError for an unknown fault."""
    if fault is None or (fault == "late_rank" and rank == 0):
        yield
        return
    if fault not in get_args(KvFault):
        raise ValueError(f"unknown fault {fault!r}; known: {', '.join(get_args(KvFault))}")
    if fault == "rope":
        with mock.patch.object(ModelShard, "__init__", _shifted(ModelShard.__init__)):
            yield
        return
    spoilers: dict[str, Spoil] = {
        "zero_layer": _zero_layer,
        "swap_kv": _swap_kv,
        "stale": _Stale(),
        "late_rank": _unwritten,
        "bad_byte": _BadBytes(),
    }
    spoil = spoilers[fault]
    run = StepRunner.run

    def run_and_spoil(self: Any, step: Step, on_written: Callable[[], None]) -> Any:
        def written() -> None:
            for chunk in step.chunks:
                spoil(self._pool, chunk)
            on_written()

        outputs = run(self, step, written)
        if not step.report_written:
            for chunk in step.chunks:
                spoil(self._pool, chunk)
        return outputs

    with mock.patch.object(StepRunner, "run", run_and_spoil):
        yield


def _shifted(init: Callable[..., None]) -> Callable[..., None]:
    def init_and_shift(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._base.register_forward_pre_hook(_shift, with_kwargs=True)

    return init_and_shift


def _shift(module: Any, arguments: Any, words: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return arguments, words | {"position_ids": words["position_ids"] + 16}


def _blocks(chunk: Chunk, pool: torch.Tensor) -> list[int]:
    """Where this chunk was written. The pool's shape: `KVGeometry.pool_shape`."""
    size = pool.shape[4]
    return list(chunk.blocks[chunk.start // size : -(-(chunk.start + len(chunk.token_ids)) // size)])


def _zero_layer(pool: torch.Tensor, chunk: Chunk) -> None:
    pool[_blocks(chunk, pool), :, 1] = 0


def _swap_kv(pool: torch.Tensor, chunk: Chunk) -> None:
    for block in _blocks(chunk, pool):
        pool[block, 0] = pool[block, 0].flip(1)


def _unwritten(pool: torch.Tensor, chunk: Chunk) -> None:
    pool[_blocks(chunk, pool)[-1]] = 0


class _Stale:
    def __init__(self) -> None:
        self._before: torch.Tensor | None = None

    def __call__(self, pool: torch.Tensor, chunk: Chunk) -> None:
        if chunk.start == 0:
            first, before = chunk.blocks[0], self._before
            self._before = pool[first].clone()
            if before is not None:
                pool[first] = before


class _BadBytes:
    def __init__(self) -> None:
        self._random = random.Random(0)

    def __call__(self, pool: torch.Tensor, chunk: Chunk) -> None:
        for block in _blocks(chunk, pool):
            if self._random.randrange(BLOCKS_PER_BAD_BYTE) == 0:
                elements = pool[block].view(-1).view(torch.uint8).view(-1, pool.element_size())
                elements[self._random.randrange(len(elements)), -1] ^= FLIPPED_BIT
