# SPDX-License-Identifier: Apache-2.0
"""Whole transfer planes without a model: a scheduler's connector and its ranks, with random pools."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.ids import Incarnation, new_transfer_id
from kvferry.transfer.layout import KVGeometry
from kvferry.transfer.memory import own_pool
from kvferry.transfer.options import BACKENDS
from kvferry.transfer.plane import PlaneConfig, RemotePrompt, one_group
from kvferry.transfer.ranks.worker import WorkerConnector
from tests.standins.faults import control, tcp

GEOMETRY = KVGeometry(
    num_layers=3, num_kv_heads=4, head_dim=8, dtype="float32", block_size=4, rope="default:10000"
)
NUM_BLOCKS = 32


class Agent:
    """One agent's transfer plane. Use as an async context manager."""

    def __init__(
        self,
        *,
        tp_size: int = 1,
        transfer: str = "tcp",
        auto: tuple[str, ...] = tuple(BACKENDS),
        tcp_fault: str | None = None,
        control_fault: str | None = None,
        transfer_options: str = "",
        seed: int = 0,
        geometry: KVGeometry = GEOMETRY,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        self.geometry = geometry
        self._tcp_fault, self._control_fault = tcp_fault, control_fault
        self.directory = tempfile.TemporaryDirectory()
        config = PlaneConfig(
            incarnation=Incarnation(secrets.token_hex(8)),
            bind_host="127.0.0.1",
            control_port=0,
            advertise_host="127.0.0.1",
            transfer=transfer,
            lease_s=2.0,
            geometry=geometry,
            num_blocks=NUM_BLOCKS,
            weights="w",
            host_id="h",
            rank_addresses=tuple(Path(self.directory.name, f"transfer-{rank}") for rank in range(tp_size)),
        )
        self.config = replace(config, **settings)
        self.pools = [self._pool(rank, seed).to(device) for rank in range(tp_size)]
        self.workers = [
            WorkerConnector(
                address=Path(self.directory.name, f"transfer-{rank}"),
                rank=rank,
                pool=own_pool(pool, geometry, tp_size, rank),
                transfer=transfer,
                auto=auto,
                bind_host="127.0.0.1",
                advertise_host="127.0.0.1",
                transfer_options=transfer_options,
            )
            for rank, pool in enumerate(self.pools)
        ]
        self.woken = asyncio.Event()
        self.plane = SchedulerConnector(self.config, self.woken.set)
        self.events: list[Any] = []

    async def __aenter__(self) -> Self:
        with tcp.injected(self._tcp_fault):
            for worker in self.workers:
                worker.start()
        with control.injected(self._control_fault):
            await self.plane.start(20.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.plane.check_integrity()
        await self.plane.close()
        for worker in self.workers:
            worker.close()
        self.directory.cleanup()

    def remote(self, num_tokens: int, **changes: Any) -> RemotePrompt:
        """A prompt of ours as another agent addresses it."""
        values = {
            "engine_id": self.config.incarnation,
            "host": "127.0.0.1",
            "port": self.plane.control_port,
            "num_tokens": num_tokens,
            "tp_size": self.config.num_ranks,
        }
        return RemotePrompt(**{**values, **changes})

    def lend(self, block_ids: Sequence[int], num_tokens: int, timeout_s: float = 30.0) -> str:
        """Lease blocks as if a prefill had just filled them; returns the transfer id."""
        transfer_id = new_transfer_id()
        self.plane.register(transfer_id, one_group(block_ids), num_tokens, "hash", timeout_s)
        self.plane.ready(transfer_id)
        return transfer_id

    async def event(self, kind: type[Any], timeout_s: float = 15.0) -> Any:
        """The next event of a kind; others before it are kept in `events`."""
        async with asyncio.timeout(timeout_s):
            while True:
                self.woken.clear()
                self.events += self.plane.take_events()
                for event in self.events:
                    if isinstance(event, kind):
                        self.events.remove(event)
                        return event
                await self.woken.wait()

    def heads(self, block: int) -> torch.Tensor:
        """One block over all ranks: [kv_head, layer, K|V, token, head_dim]."""
        return torch.cat([pool[block] for pool in self.pools])

    def _pool(self, rank: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        shape = self.geometry.pool_shape(NUM_BLOCKS, len(self.geometry.local_heads(len(self._ranks()), rank)))
        return torch.rand(shape, generator=generator)

    def _ranks(self) -> range:
        return range(self.config.num_ranks)


def thread_seconds() -> dict[int, float]:
    """CPU time of every thread of this process so far, by its number."""
    seconds = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended meanwhile
            seconds[int(path.parent.name)] = int(path.read_text().split()[0]) / 1e9
    return seconds


async def idle_cost(others: Set[int]) -> float:
    """CPU time over a second of all threads but `others`: those of other tests, which may still be ending."""
    before = thread_seconds()
    await asyncio.sleep(1.0)
    after = thread_seconds()
    return sum(spent - before.get(thread, 0.0) for thread, spent in after.items() if thread not in others)


def assert_same_kv(producer: Agent, theirs: Sequence[int], consumer: Agent, ours: Sequence[int]) -> None:
    """Block by block, whatever the TP sizes."""
    for source, destination in zip(theirs, ours, strict=True):
        assert torch.equal(producer.heads(source), consumer.heads(destination)), (source, destination)
