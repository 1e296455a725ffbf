# SPDX-License-Identifier: Apache-2.0
"""What a process does that is one whole transfer plane, so that it can be stopped and killed."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

from kvferry.transfer.plane import one_group
from tests.unit.transfer.rig import Agent

THEIRS = [3, 4, 5, 9, 1]
OURS = [20, 21, 22, 7, 30]
TOKENS = 18


def produce(connection: Connection, backend: str) -> None:
    """Lend 4 prompts, and say where."""

    async def run() -> None:
        async with Agent(seed=1, transfer=backend, lease_s=30.0) as agent:
            ids = [agent.lend(THEIRS, TOKENS, timeout_s=60.0) for _ in range(4)]
            connection.send((agent.remote(TOKENS), ids))
            await _heard(connection)

    asyncio.run(run())


def consume(connection: Connection, lease_s: float) -> None:
    """Pull what stdin names."""

    async def run() -> None:
        async with Agent(seed=2, lease_s=lease_s) as agent:
            connection.send("ready")
            await _heard(connection)
            remote, transfer_id = connection.recv()
            agent.plane.pull(transfer_id, remote, one_group(OURS), 30.0)
            await _heard(connection)

    asyncio.run(run())


async def _heard(connection: Connection) -> None:
    """Until there is something to receive, or an end."""
    await asyncio.get_running_loop().run_in_executor(None, connection.poll, None)
