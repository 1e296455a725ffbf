# SPDX-License-Identifier: Apache-2.0
"""Computes one rank's checksums, a slice at a time between transfers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.transfer.checksum import PoolSums, SumTable, pack_sums
from kvferry.transfer.memory import KVPool
from kvferry.transfer.ranks.messages import BlocksSummed, SumBlocks

_SLICE_BYTES = 8 << 20
"""About 2 ms on one core, for which transfers have to wait."""


@dataclass(slots=True)
class _Job:
    command: SumBlocks
    parts: list[list[SumTable]] = field(default_factory=list)
    """By group."""
    done: int = 0
    """Blocks of the group that is being summed."""


class RankSums:
    """Sums blocks in the order in which they are asked for. Single-threaded; costs nothing until then."""

    def __init__(self, rank: int, pool: KVPool, report: Callable[[BlocksSummed], None]) -> None:
        self._rank = rank
        self._pool = pool
        self._sums: PoolSums | None = None
        self._report = report
        self._jobs: deque[_Job] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def add(self, command: SumBlocks) -> None:
        """Queue a job; there are at most as many as leases and pulls."""
        self._jobs.append(_Job(command))

    def advance(self) -> None:
        """Do one slice of the first job, and report it if that was its last."""
        if not self._jobs:
            return
        if self._sums is None:
            self._sums = PoolSums(self._pool)
        job = self._jobs[0]
        if not job.done:
            job.parts.append([])
        group = len(job.parts) - 1
        blocks = job.command.blocks[group]
        count = max(1, _SLICE_BYTES // max(1, self._sums.block_bytes(group)))
        part = blocks[job.done : job.done + count]
        if job.command.clear:
            self._sums.clear(group, part)
        job.parts[group].append(self._sums.sums(group, part))
        job.done += count
        if job.done < len(blocks):
            return
        job.done = 0
        if len(job.parts) == len(job.command.blocks):
            self._jobs.popleft()
            sums = tuple(pack_sums(np.concatenate(parts)) for parts in job.parts)
            self._report(BlocksSummed(rank=self._rank, number=job.command.number, sums=sums))
