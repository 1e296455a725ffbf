# SPDX-License-Identifier: Apache-2.0
"""A decode step while KV is pulled beside it and while none is, as clients see it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import aiohttp
import numpy as np

from benchmarks.pd.fleet import MODEL, Running, Setup, System, kv_moved, running
from benchmarks.pd.load import LONG, SHORT, quantiles
from kvferry.proxy.dialects.vllm import HAND_OVER
from kvferry.proxy.ids import new_transfer_id

EXECUTORS = ("uni", "mp")
BATCHES = (16, 64)
WINDOW_S = 5.0
PULLS_PER_S = 4.0
"""Prompts of LONG tokens, as a server with some eight requests a second has, half of them long."""
PULLERS = 4
"""Requests at a time, one after the other, so that some pull is always in flight."""
HELD = 400
"""Leases on one prompt's blocks, taken before a window in which they are pulled."""
LEASE_S = 60.0
JOINING = 16
"""Tokens of a prompt that is computed where another would be pulled."""
ANSWER = 8000
TIMEOUT = aiohttp.ClientTimeout(total=300)

Params = dict[str, Any]
"""`kv_transfer_params` of a request, or of its response."""


async def decode_steps(setup: Setup, system: System, vocabulary: int, figures: dict[str, Any]) -> None:
    """Add to `figures` for each executor of vLLM and batch: milliseconds between the tokens of streams that
    the decode server has without a proxy, alone and beside requests whose KV is pulled, some a second and as
    many as go. The KV has been computed before, so the prefill server does nothing meanwhile, and its GPU may
    be the decode's. Then beside as many requests that pull nothing: what it costs that requests come.
    """
    for executor in EXECUTORS:
        own = replace(
            setup,
            arguments=(*setup.arguments, "--distributed-executor-backend", executor),
            prefill_arguments=("--enable-prefix-caching",),
            settings={**setup.settings, "lease_s": LEASE_S},
        )
        async with running(system, own) as fleet:
            for batch in BATCHES:
                found = await _beside_pulls(fleet, batch, vocabulary)
                print(f"{executor}, batch {batch}: {json.dumps(found)}", flush=True)
                figures[f"{executor}, batch {batch}"] = found


async def _beside_pulls(fleet: Running, batch: int, vocabulary: int) -> dict[str, Any]:
    prefill, decode = fleet.servers
    prompt, joining = _prompt(LONG, vocabulary), _prompt(JOINING, vocabulary)
    times: list[list[float]] = [[] for _ in range(batch)]
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT, read_bufsize=1 << 20
    ) as http:
        streams = [
            asyncio.create_task(_stream(http, decode, _prompt(SHORT, vocabulary), own)) for own in times
        ]
        try:
            async with asyncio.timeout(60):
                while not all(times):
                    await asyncio.sleep(0.1)
                lent = await _lend(http, prefill, prompt, HELD)
                await _ask(http, decode, prompt, next(lent))
            windows = _Windows(times, decode)
            await windows.alone()
            await windows.beside("pulls", _at_a_rate(http, decode, prompt, lent, PULLS_PER_S))
            await windows.beside("most_pulls", _one_after_the_other(http, decode, prompt, lent))
            pulls_per_s = windows.figures["most_pulls"]["pulls"] / WINDOW_S
            await windows.beside("joins", _at_a_rate(http, decode, joining, repeat(None), pulls_per_s))
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
    return windows.figures


class _Windows:
    """What the streams of a decode server see, window after window. Contexts grow meanwhile, and steps with
    them: so a window beside requests lies between two without any, `figures["alone_ms"]`.
    """

    def __init__(self, times: list[list[float]], decode: str) -> None:
        self._alone: list[dict[str, float]] = []
        self.figures: dict[str, Any] = {"alone_ms": self._alone}
        self._times = times
        self._decode = decode

    async def alone(self) -> None:
        """Before the first `beside`; each of them ends with one."""
        self._alone.append(await self._window())

    async def beside(self, name: str, requests: Coroutine[Any, Any, None]) -> None:
        """A window beside requests, and one alone. Raises `AssertionError` if the requests end within it."""
        before = await kv_moved("kvferry", [self._decode])
        asking = asyncio.create_task(requests)
        try:
            found = await self._window()
            if asking.done():
                await asking
                raise AssertionError(f"{name}: there were too few leases for the window")
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        moved = (await kv_moved("kvferry", [self._decode])).since(before)
        await self.alone()
        usual = (self._alone[-2]["mean"] + self._alone[-1]["mean"]) / 2
        self.figures[name] = {
            "ms": found,
            "pulls": moved["transfers"],
            "pulled_gb_s": round(moved["gb"] / WINDOW_S, 2),
            "slower": round(found["mean"] / usual - 1, 4),
        }

    async def _window(self) -> dict[str, float]:
        """The next WINDOW_S."""
        began = time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        inside = [[at for at in own if at >= began] for own in self._times]
        if min(map(len, inside)) < 2:
            raise AssertionError("a stream stood still, or has ended")
        gaps = np.concatenate([np.diff(own) for own in inside]) * 1e3
        mean = float(np.median([(own[-1] - own[0]) / (len(own) - 1) for own in inside])) * 1e3
        return {"mean": round(mean, 3), **quantiles(gaps)}


async def _lend(http: aiohttp.ClientSession, prefill: str, prompt: list[int], count: int) -> Iterator[Params]:
    """So many leases on the blocks of one prompt, which is computed once."""
    params = [HAND_OVER | {"transfer_id": new_transfer_id()} for _ in range(count)]
    first = await _ask(http, prefill, prompt, params[0])
    others = await asyncio.gather(*(_ask(http, prefill, prompt, each) for each in params[1:]))
    return iter([each["kv_transfer_params"] for each in (first, *others)])


async def _at_a_rate(
    http: aiohttp.ClientSession, url: str, prompt: list[int], lent: Iterable[Params | None], rate: float
) -> None:
    async with asyncio.TaskGroup() as group:
        for params in lent:
            group.create_task(_ask(http, url, prompt, params))
            await asyncio.sleep(1 / rate)


async def _one_after_the_other(
    http: aiohttp.ClientSession, url: str, prompt: list[int], lent: Iterator[Params]
) -> None:
    async def one() -> None:
        for params in lent:
            await _ask(http, url, prompt, params)

    async with asyncio.TaskGroup() as group:
        for _ in range(PULLERS):
            group.create_task(one())


async def _ask(
    http: aiohttp.ClientSession, url: str, prompt: list[int], params: Params | None
) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    if params is not None:
        body |= {"max_tokens": 1} if params["do_remote_decode"] else {}
        body["kv_transfer_params"] = params
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise AssertionError(f"{response.status} {(await response.text())[:300]}")
        return dict(await response.json())


async def _stream(http: aiohttp.ClientSession, url: str, prompt: list[int], times: list[float]) -> None:
    sampling = {"max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
    body = {"model": MODEL, "prompt": prompt, "stream": True, **sampling}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise AssertionError(f"{response.status} {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())


def _prompt(length: int, vocabulary: int) -> list[int]:
    return [random.randrange(3, vocabulary) for _ in range(length)]
