# SPDX-License-Identifier: Apache-2.0
"""Ordinary clients beside an abusive one, and what they and the machine notice of it.

Sixteen streams go on all the time, each of which must succeed with the same text every time. Beside them,
`/health` of every process, `/nodes` of the proxy and the memory of every process are looked at.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from kvferry.deploy.launcher import Cluster, Process

MODEL = "ferry-tiny"
NUM_STREAMS = 16
SLACK_S = 1.0
"""How much longer than without abuse a stream may stand still."""
HEALTH_S = 0.5
"""How much longer than without abuse `/health` may take."""
USUAL_EVENTS_PER_S = 2500
"""Of undisturbed streams, on the machine for which these bounds were stated: 2 cores, and nothing beside it.
One that is slower, or busy, is given more time accordingly.
"""
MAX_BODY = 8 * 2**20
"""The limit of a body, as `--max-body-bytes` has it by default."""
GROWTH = 4
"""How many times the body any process's memory may grow."""
LOOK_S = 0.1
TICK_S = 0.01
SETTLE_S = 0.3
"""How long after an attack it may still be noticed."""
CONTROL_S = 3.0
OUTPUT_TOKENS = 200

Action = Callable[[], Coroutine[Any, Any, None]]
"""What is done beside the ordinary streams, each time that it is called."""


@dataclass(slots=True)
class Seen:
    """What was seen in one window of time: seconds, bytes, and agents that were out of rotation."""

    longest_gap: float = 0.0
    """The longest stand of any stream, its first token included."""
    slowest_health: float = 0.0
    own_delay: float = 0.0
    """How late this process itself ran at most: no server's doing, but it looks like a stall of theirs."""
    events: int = 0
    seconds: float = 0.0
    growth: dict[str, int] = field(default_factory=dict)
    """By process, its resident memory's peak above what it was at first."""
    left: set[str] = field(default_factory=set)

    def growths(self, most: int) -> list[str]:
        """Which processes' memory grew by more than `most` bytes; empty if none did."""
        grown = {name: size for name, size in self.growth.items() if size > most}
        return [f"{name} grew by {size >> 20} MiB" for name, size in grown.items()]

    def delays(self, control: Seen) -> list[str]:
        """What took too long beside the undisturbed `control`; empty if nothing did."""
        slowness = max(1.0, USUAL_EVENTS_PER_S * control.seconds / max(1, control.events))
        found = [f"out of rotation: {each}" for each in sorted(self.left)]
        for what, took, usual, slack in (
            ("a stream stood still for", self.longest_gap, control.longest_gap, SLACK_S),
            ("/health took", self.slowest_health, control.slowest_health, HEALTH_S),
        ):
            if took > usual + slack * slowness + self.own_delay:
                found.append(f"{what} {took:.2f} s ({usual:.2f} s)")
        return found

    def summary(self) -> str:
        """The window in a line."""
        name, grown = max(self.growth.items(), key=lambda each: each[1], default=("nothing", 0))
        return (
            f"longest gap {self.longest_gap:.2f} s, /health {self.slowest_health:.2f} s, "
            f"this process {self.own_delay:.2f} s late, {self.events} events in {self.seconds:.1f} s, "
            f"{name} grew most: {grown / 2**20:.1f} MiB"
        )


def family(processes: Sequence[Process]) -> dict[str, psutil.Process]:
    """Every process, those started by others included, by a readable name."""
    members = {}
    for process in processes:
        root = psutil.Process(process.pid)
        for member in [root, *root.children(recursive=True)]:
            module = next((word for word in member.cmdline() if word.startswith("kvferry.")), "")
            members[f"{process.name}/{module.removeprefix('kvferry.')}/{member.pid}"] = member
    return members


class Ordinary:
    """The ordinary clients of one server, and what they were answered at first."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._texts: dict[int, str] = {}

    @asynccontextmanager
    async def streaming(self, seen: Seen) -> AsyncIterator[None]:
        """Keep 16 streams going while open; each must succeed. All have begun when this is entered."""
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
            asyncio.TaskGroup() as tasks,
        ):
            streams = [
                tasks.create_task(self._stream(http, index, begun, seen)) for index in range(NUM_STREAMS)
            ]
            for event in begun:
                await event.wait()
            yield
            for task in streams:
                task.cancel()

    async def _stream(
        self, http: aiohttp.ClientSession, index: int, begun: list[asyncio.Event], seen: Seen
    ) -> None:
        body = {
            "model": MODEL,
            "prompt": f"An ordinary question, number {index}.",
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        while True:
            last, text, done = time.monotonic(), "", False
            async with http.post(f"{self.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    assert b'"error"' not in line, line
                    done = line == b"data: [DONE]\n"
                    text += "" if done else json.loads(line[6:])["choices"][0]["text"]
                    now = time.monotonic()
                    if all(event.is_set() for event in begun):
                        seen.longest_gap = max(seen.longest_gap, now - last)
                    last = now
                    seen.events += 1
                    begun[index].set()
            assert done, "a stream without an end"
            assert text == self._texts.setdefault(index, text), "another answer than at first"


@asynccontextmanager
async def watching(cluster: Cluster, ordinary: Ordinary) -> AsyncIterator[Seen]:
    """Keep ordinary streams going and look at everything, as long as this is open."""
    seen = Seen()
    members = family(cluster.processes)
    async with ordinary.streaming(seen), asyncio.TaskGroup() as tasks:
        watchers = [
            *(tasks.create_task(_watch_health(process.url, seen)) for process in cluster.processes),
            tasks.create_task(_watch_rotation(cluster, seen)),
            tasks.create_task(_watch_memory(members, seen)),
            tasks.create_task(_watch_this_process(seen)),
        ]
        begun = time.monotonic()
        yield seen
        seen.seconds = time.monotonic() - begun
        for task in watchers:
            task.cancel()


async def control_window(cluster: Cluster, ordinary: Ordinary, seconds: float = CONTROL_S) -> Seen:
    """What undisturbed streams look like on this machine, now."""
    async with watching(cluster, ordinary) as seen:
        await asyncio.sleep(seconds)
    return seen


async def complaints_about(
    action: Action, cluster: Cluster, ordinary: Ordinary, control: Seen, most_growth: int
) -> list[str]:
    """Carry out `action` beside ordinary streams; returns why that was noticed, empty if it was not.

    What took too long is judged twice, the second time beside a control window of its own, since a machine
    that others use may be busy for a while.

    Args:
        most_growth: Bytes by which any process's memory may grow.
    """
    seen = await _beside(action, cluster, ordinary)
    growths = seen.growths(most_growth)
    if growths or not (delays := seen.delays(control)):
        return growths
    control = await control_window(cluster, ordinary)
    print(f"once more, since {delays}; control: {control.summary()}")
    again = await _beside(action, cluster, ordinary)
    return again.growths(most_growth) + again.delays(control)


async def _beside(action: Action, cluster: Cluster, ordinary: Ordinary) -> Seen:
    async with watching(cluster, ordinary) as seen:
        # In a thread: a stall of this loop would look like one of theirs.
        await asyncio.to_thread(asyncio.run, action())
        await asyncio.sleep(SETTLE_S)
    print(seen.summary())
    return seen


async def _watch_health(url: str, seen: Seen) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        while True:
            began = time.monotonic()
            async with http.get(f"{url}/health") as response:
                assert response.status == 200
            seen.slowest_health = max(seen.slowest_health, time.monotonic() - began)
            await asyncio.sleep(LOOK_S)


async def _watch_rotation(cluster: Cluster, seen: Seen) -> None:
    mine = {agent.url: name for name, agent in cluster.agents.items()}
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{cluster.url}/nodes") as response:
                nodes = {node["address"]: node for node in (await response.json())["nodes"]}
            for address, name in mine.items():
                node: dict[str, Any] = nodes.get(address, {"state": "gone", "breaker": "gone"})
                if (node["state"], node["breaker"]) != ("ready", "closed"):
                    seen.left.add(f"{name}: {node['state']}, breaker {node['breaker']}")
            await asyncio.sleep(2 * LOOK_S)


async def _watch_memory(members: dict[str, psutil.Process], seen: Seen) -> None:
    before = {name: member.memory_info().rss for name, member in members.items()}
    while True:
        for name, member in members.items():
            grown = member.memory_info().rss - before[name]
            seen.growth[name] = max(seen.growth.get(name, 0), grown)
        await asyncio.sleep(LOOK_S)


async def _watch_this_process(seen: Seen) -> None:
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        seen.own_delay = max(seen.own_delay, time.monotonic() - due)
