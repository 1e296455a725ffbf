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
    parts: list[SumTable] = field(default_factory=list)
    done: int = 0


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
        count = max(1, _SLICE_BYTES // self._sums.block_bytes)
        job.parts.append(self._sums.sums(job.command.blocks[job.done : job.done + count]))
        job.done += count
        if job.done >= len(job.command.blocks):
            self._jobs.popleft()
            sums = pack_sums(np.concatenate(job.parts))
            self._report(BlocksSummed(rank=self._rank, number=job.command.number, sums=sums))
