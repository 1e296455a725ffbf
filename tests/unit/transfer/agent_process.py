# SPDX-License-Identifier: Apache-2.0
"""A whole transfer plane in a process of its own, so that it can be stopped and killed.

    python -m tests.unit.transfer.agent_process produce BACKEND      lends 4 prompts, prints where
    python -m tests.unit.transfer.agent_process consume              pulls what a line on stdin names

It ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec

from tests.unit.transfer.rig import Agent
from transfer.connector import Remote

THEIRS = [3, 4, 5, 9, 1]
OURS = [20, 21, 22, 7, 30]
TOKENS = 18


def say(message: object) -> None:
    print(json.dumps(message), flush=True)


async def stdin_ends() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def produce(backend: str) -> None:
    async with Agent(seed=1, transfer=backend, lease_s=30.0) as agent:
        ids = [agent.lend(THEIRS, TOKENS, timeout_s=60.0) for _ in range(4)]
        say({"remote": msgspec.to_builtins(agent.remote(TOKENS)), "ids": ids})
        await stdin_ends()


async def consume() -> None:
    async with Agent(seed=2, lease_s=1.0) as agent:
        say("ready")
        order = json.loads(await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline))
        agent.plane.pull(order["id"], msgspec.convert(order["remote"], Remote), OURS, 0, 30.0)
        await stdin_ends()


if __name__ == "__main__":
    asyncio.run({"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:]))
