# SPDX-License-Identifier: Apache-2.0
"""The whole plane between two processes: from `open` to the last byte, and what its control channel costs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from benchmarks.transfer.plane_agent import PlaneAgent
from benchmarks.transfer.pools import POISON, count_wrong, random_pool, settle
from benchmarks.transfer.reader import ROOT
from kvferry.transfer.events import PullDone
from kvferry.transfer.layout import KVGeometry
from kvferry.transfer.plane import RemotePrompt, one_group

_DEADLINE_S = 60.0


class LendingProcess:
    """The producer. It starts at once. Use as a context manager."""

    def __init__(self, backend: str, geometry: KVGeometry, num_blocks: int, device: str, seed: int) -> None:
        self.backend = backend
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.device = device
        self.seed = seed
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.transfer.plane_agent", backend, device),
                *(str(num_blocks), str(seed), msgspec.json.encode(geometry).decode()),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def address(self) -> RemotePrompt:
        """Waits for its first line."""
        return msgspec.convert(self._line(), RemotePrompt)

    def lend(self, prompts: list[list[int]]) -> list[str]:
        """Have the blocks of several prompts leased; returns the transfers' ids."""
        return list(self._ask(json.dumps(prompts)))

    def cpu_seconds(self) -> float:
        return float(self._ask("cpu"))

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.startswith(("{", "[", *"0123456789")):
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the lending process has ended")
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Timing:
    """One pull: seconds from `open` until the last byte was reported, and until the lease was confirmed."""

    last_byte_s: float
    proven_s: float


class Puller:
    """An agent of this process that pulls from a lending one. Both pools are of one size."""

    def __init__(self, lender: LendingProcess, agent: PlaneAgent, remote: RemotePrompt) -> None:
        self._lender = lender
        self._agent = agent
        self._remote = remote
        self._random = np.random.default_rng(11)

    async def pull(self, count: int) -> tuple[Timing, list[int], list[int]]:
        """Pull so many scattered blocks. Returns their numbers there and here, too."""
        theirs, ours = (self._random.permutation(self._lender.num_blocks)[:count].tolist() for _ in range(2))
        (transfer_id,) = self._lender.lend([theirs])
        return await self.pull_lent(transfer_id, ours, first_block=0), theirs, ours

    async def pull_lent(self, transfer_id: str, ours: list[int], first_block: int) -> Timing:
        """Pull blocks that are leased, from number `first_block` on."""
        plane = self._agent.plane
        tokens = len(ours) * self._lender.geometry.block_size
        remote = msgspec.structs.replace(self._remote, num_tokens=tokens)
        begun = time.perf_counter()
        plane.pull(transfer_id, remote, one_group(ours, first_block), _DEADLINE_S)
        event = await self._agent.ended(_DEADLINE_S)
        proven = time.perf_counter()
        if not isinstance(event, PullDone):
            raise RuntimeError(f"the pull came to {event}")
        return Timing(plane.read_ended_at - begun, proven - begun)

    async def check(self, count: int) -> None:
        """Pull into a poisoned pool, and raise RuntimeError unless exactly the blocks' bytes came."""
        pool, lender = self._agent.pool_bytes, self._lender
        pool.fill_(POISON)
        settle(pool)
        _, theirs, ours = await self.pull(count)
        block_bytes = len(pool) // lender.num_blocks
        spans = np.array([ours, theirs, [1] * count], dtype=np.int64).T * block_bytes
        wrong = count_wrong(pool, random_pool(len(pool), lender.seed, lender.device).to(pool.device), spans)
        if wrong:
            raise RuntimeError(f"{wrong} blocks are not what they should be")

    async def median(self, count: int, rounds: int) -> Timing:
        timings = [(await self.pull(count))[0] for _ in range(rounds)]
        return Timing(
            statistics.median(each.last_byte_s for each in timings),
            statistics.median(each.proven_s for each in timings),
        )
