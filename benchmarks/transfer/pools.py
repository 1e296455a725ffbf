# SPDX-License-Identifier: Apache-2.0
"""Pools of random bytes that both sides can make, and the scattered spans between them."""

from __future__ import annotations

import numpy as np
import torch

from kvferry.transfer.layout import SpanTable
from kvferry.transfer.memory import allocate_pool

POISON = 0xA5


def settle(pool: torch.Tensor) -> None:
    """What this thread did to the pool is done: backends do not wait for its stream."""
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)


def random_pool(nbytes: int, seed: int, device: str) -> torch.Tensor:
    """Random bytes, the same for a seed wherever they are made on the same kind of device."""
    pool = allocate_pool((nbytes,), torch.uint8, device)
    pool.view(torch.int64).random_(generator=torch.Generator(device).manual_seed(seed))
    settle(pool)
    return pool


def poisoned_pool(nbytes: int, device: str) -> torch.Tensor:
    """A destination in which unwritten bytes show."""
    pool = allocate_pool((nbytes,), torch.uint8, device)
    pool.fill_(POISON)
    settle(pool)
    return pool


def scattered(block_bytes: int, count: int, pool_bytes: int, seed: int) -> SpanTable:
    """Random distinct blocks on both sides, `block_bytes` each."""
    random = np.random.default_rng(seed)
    places = pool_bytes // block_bytes
    table = np.empty((count, 3), dtype=np.int64)
    table[:, 0] = random.permutation(places)[:count] * block_bytes
    table[:, 1] = random.permutation(places)[:count] * block_bytes
    table[:, 2] = block_bytes
    return table


def count_wrong(ours: torch.Tensor, theirs: torch.Tensor, spans: SpanTable) -> int:
    """Blocks of a poisoned pool that are not what `scattered` spans should have made of it."""
    block_bytes = int(spans[0, 2])
    used = len(ours) // block_bytes * block_bytes
    wanted = torch.full_like(ours[:used], POISON).view(-1, block_bytes)
    local, remote = (torch.from_numpy(spans[:, side] // block_bytes).to(ours.device) for side in (0, 1))
    wanted[local] = theirs[:used].view(-1, block_bytes)[remote]
    return int((wanted != ours[:used].view(-1, block_bytes)).any(dim=1).sum())
