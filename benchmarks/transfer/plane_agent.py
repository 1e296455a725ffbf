# SPDX-License-Identifier: Apache-2.0
"""One agent's whole transfer plane with a large pool, and as a process, one that lends its blocks.

    python -m benchmarks.transfer.plane_agent BACKEND DEVICE NUM_BLOCKS SEED GEOMETRY_JSON

As a process it prints where it is. Then for every line on its stdin, a JSON list of lists of block numbers,
it leases each of those and answers with a line of JSON, the transfers' ids. The line `cpu` is answered with
the seconds of CPU time that it has used. It ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from benchmarks.transfer.pools import poisoned_pool, random_pool
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.events import PlaneEvent
from kvferry.transfer.ids import Incarnation, TransferId, new_transfer_id
from kvferry.transfer.layout import KVGeometry
from kvferry.transfer.memory import own_pool
from kvferry.transfer.plane import PlaneConfig, RemotePrompt, one_group
from kvferry.transfer.ranks.aggregate import Outcome
from kvferry.transfer.ranks.worker import WorkerConnector

LEASE_S = 30.0
_START_S = 60.0


class _TimedConnector(SchedulerConnector):
    """Notes when the last byte of a read was reported."""

    def __init__(self, config: PlaneConfig, wake: Callable[[], None]) -> None:
        super().__init__(config, wake)
        self.read_ended_at = 0.0
        read_ended = self._consumer.read_ended

        def timed(transfer_id: TransferId, seq: int, outcome: Outcome) -> None:
            self.read_ended_at = time.perf_counter()
            read_ended(transfer_id, seq, outcome)

        self._consumer.read_ended = timed  # type: ignore[method-assign]


class PlaneAgent:
    """One rank, and what stands for the scheduler of its engine. Use as an async context manager."""

    def __init__(
        self,
        backend: str,
        geometry: KVGeometry,
        num_blocks: int,
        device: str,
        seed: int | None,
        options: str = "",
    ) -> None:
        """With a seed the pool is random, else poisoned."""
        shape = geometry.pool_shape(num_blocks, geometry.num_kv_heads)
        nbytes = num_blocks * geometry.num_kv_heads * geometry.head_block_bytes
        self.pool_bytes = poisoned_pool(nbytes, device) if seed is None else random_pool(nbytes, seed, device)
        self._directory = tempfile.TemporaryDirectory()
        config = PlaneConfig(
            incarnation=Incarnation(secrets.token_hex(8)),
            bind_host="127.0.0.1",
            control_port=0,
            advertise_host="127.0.0.1",
            transfer=backend,
            lease_s=LEASE_S,
            geometry=geometry,
            num_blocks=num_blocks,
            weights="bench",
            host_id="bench",
            rank_addresses=(Path(self._directory.name, "transfer"),),
        )
        self._config = config
        self._worker = WorkerConnector(
            address=Path(self._directory.name, "transfer"),
            rank=0,
            pool=own_pool(self.pool_bytes.view(getattr(torch, geometry.dtype)).view(shape), geometry, 1, 0),
            transfer=backend,
            bind_host="127.0.0.1",
            advertise_host="127.0.0.1",
            transfer_options=options,
        )
        self._woken = asyncio.Event()
        self.plane = _TimedConnector(config, self._woken.set)

    async def __aenter__(self) -> Self:
        self._worker.start()
        await self.plane.start(_START_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.plane.close()
        self._worker.close()
        self._directory.cleanup()

    def address(self) -> RemotePrompt:
        """Where we are; how many tokens, the caller fills in."""
        return RemotePrompt(
            engine_id=self._config.incarnation,
            host="127.0.0.1",
            port=self.plane.control_port,
            num_tokens=0,
            tp_size=1,
        )

    def lend(self, blocks: list[int]) -> str:
        """Lease blocks as if a prefill had just filled them."""
        transfer_id = new_transfer_id()
        tokens = len(blocks) * self._config.geometry.block_size
        self.plane.register(transfer_id, one_group(blocks), tokens, "hash", LEASE_S * 2)
        self.plane.ready(transfer_id)
        return transfer_id

    async def ended(self, timeout_s: float) -> PlaneEvent:
        """The next event."""
        async with asyncio.timeout(timeout_s):
            while True:
                self._woken.clear()
                for event in self.plane.take_events():
                    return event
                await self._woken.wait()


async def _lines(agent: PlaneAgent) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.strip() == "cpu":
            said: object = time.process_time()
        else:
            said = [agent.lend(blocks) for blocks in json.loads(line)]
        agent.plane.take_events()
        print(json.dumps(said), flush=True)


async def _serve(backend: str, device: str, num_blocks: str, seed: str, geometry: str) -> None:
    shape = msgspec.json.decode(geometry, type=KVGeometry)
    async with PlaneAgent(backend, shape, int(num_blocks), device, int(seed)) as agent:
        print(json.dumps(msgspec.to_builtins(agent.address())), flush=True)
        await _lines(agent)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
