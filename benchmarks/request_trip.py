# SPDX-License-Identifier: Apache-2.0
"""How much of the proxy's code one request passes through: files, functions, calls, moves between files.

A proxy serves stand-in agents, which run in another thread, so that `sys.setprofile` sees the proxy alone.
Each trip is taken several times when all is warm (connections, caches), and what is common to all counts: a
timer or a ping may fall into any one. The registry's sweep, which the first call after a while makes, is left
out: on a busy machine every trip would make it. Only code of this repository's packages is counted; a
coroutine that goes on after a wait counts as a call.

`python -m benchmarks.request_trip` prints the table, `--functions` also what was called.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import aiohttp

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet import registry
from kvferry.proxy.server import RunningProxy, running_proxy
from tests.standins.agents import StandInAgent

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("common", "proxy"))
TOKENS = 8
ROUNDS = 12
WARM_UP = 3
DEADLINE_S = 60.0
BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": TOKENS, "seed": 7}


@dataclass(slots=True)
class Trip:
    """What was called between two moments, in one thread."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    moves: int = 0
    """Calls from one of our files into another, whatever lies between."""
    within: str = ""
    """Where not empty, only what a function of this file calls counts, and these functions."""
    _ours: dict[CodeType, bool] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        return {code.co_filename.removeprefix(f"{ROOT}/") for code in self.calls}

    def row(self) -> dict[str, int]:
        """The figures of the table."""
        return {
            "files": len(self.files),
            "functions": len(self.calls),
            "calls": self.calls.total(),
            "moves": self.moves,
        }

    @classmethod
    def common(cls, trips: Sequence[Trip]) -> Trip:
        """What all of them have in common."""
        first, *others = trips
        calls = Counter(first.calls)
        for trip in others:
            calls &= trip.calls
        return cls(calls, min(trip.moves for trip in trips))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record this thread's calls while open."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self._is_ours(code) or not self._is_within(frame):
            return
        self.calls[code] += 1
        caller = frame.f_back
        while caller is not None and not self._is_ours(caller.f_code):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.moves += 1

    def _is_within(self, frame: FrameType | None) -> bool:
        while frame is not None and not frame.f_code.co_filename.endswith(self.within):
            frame = frame.f_back
        return frame is not None

    def _is_ours(self, code: CodeType) -> bool:
        known = self._ours.get(code)
        if known is None:
            known = self._ours[code] = code.co_filename.startswith(PACKAGES)
        return known


class Agents:
    """A native pair in a thread of its own."""

    def __init__(self, discovery: str, ping_interval_s: float) -> None:
        self._discovery = discovery
        self._ping_interval_s = ping_interval_s
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="agents")

    def __enter__(self) -> Agents:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        made = [
            StandInAgent(role, (self._discovery,), ping_interval_s=self._ping_interval_s)
            for role in ("prefill", "decode")
        ]
        async with made[0], made[1]:
            await self._stop.wait()


@asynccontextmanager
async def warm_pair() -> AsyncIterator[tuple[RunningProxy, aiohttp.ClientSession]]:
    """A proxy with a pair that has served requests."""
    async with (
        running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy,
        aiohttp.ClientSession() as http,
    ):
        with Agents(f"127.0.0.1:{proxy.discovery_port}", ping_interval_s=0.5):
            async with asyncio.timeout(DEADLINE_S):
                while proxy.fleet.registry.snapshot().models != {BODY["model"]} or (
                    len(proxy.fleet.registry.snapshot().nodes) < 2
                ):
                    await asyncio.sleep(0.01)
                for stream in (True, False) * WARM_UP:
                    await ask(proxy.url, http, stream=stream)
                with mock.patch.object(registry, "SWEEP_INTERVAL_S", math.inf):
                    yield proxy, http


async def ask(url: str, http: aiohttp.ClientSession, *, stream: bool) -> bytes:
    async with http.post(f"{url}/v1/completions", json={**BODY, "stream": stream}) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def request_trip(proxy: RunningProxy, http: aiohttp.ClientSession, *, stream: bool) -> Trip:
    """One request, from its first byte to its last and to what follows in the same turns."""
    trips, url = [], proxy.url
    for _ in range(ROUNDS):
        await asyncio.sleep(0.02)
        trip = Trip()
        gc.disable()
        try:
            with trip.recording():
                raw = await ask(url, http, stream=stream)
                await asyncio.sleep(0.01)
        finally:
            gc.enable()
        assert not stream or raw.count(b'"text":') == TOKENS, raw
        trips.append(trip)
    return Trip.common(trips)


async def ping_trip(proxy: RunningProxy) -> Trip:
    """A ping of an agent that is known, from the socket to the registry and its ack."""
    trips = []
    for _ in range(ROUNDS // 2):
        trip = Trip(within="proxy/discovery/ping_listener.py")
        with trip.recording():
            await asyncio.sleep(0.26)  # half of the interval of two agents: one ping, or two
        if trip.calls:
            trips.append(trip)
    return Trip.common(trips)


async def measure() -> dict[str, Trip]:
    """Take all trips."""
    async with warm_pair() as (proxy, http):
        return {
            "streamed request": await request_trip(proxy, http, stream=True),
            "whole request": await request_trip(proxy, http, stream=False),
            "ping": await ping_trip(proxy),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="also list what was called, by file")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args()
    trips = asyncio.run(measure())
    rows: dict[str, Any] = {name: trip.row() for name, trip in trips.items()}
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'trip':18} files functions calls moves")
    for name, row in rows.items():
        print(f"{name:18} {row['files']:5} {row['functions']:9} {row['calls']:5} {row['moves']:5}")
    for name, trip in trips.items() if options.functions else ():
        print(f"\n{name}")
        for path in sorted(trip.files):
            here = [code for code in trip.calls if code.co_filename == f"{ROOT}/{path}"]
            shown = sorted(f"{code.co_qualname} {trip.calls[code]}" for code in here)
            print(f"  {path} ({len(here)}): {', '.join(shown)}")


if __name__ == "__main__":
    main()
