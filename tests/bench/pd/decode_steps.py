# SPDX-License-Identifier: Apache-2.0
"""A decode step while KV is pulled beside it and while none is, as clients see it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from tests.bench.pd.fleet import MODEL, Running, Setup, System, kv_moved, running
from tests.bench.pd.load import LONG, SHORT, quantiles

EXECUTORS = ("uni", "mp")
BATCHES = (16, 64)
WINDOW_S = 5.0
PULLERS = 4
"""Requests of LONG tokens at a time, of which the prefill server has the KV in its prefix cache."""
ANSWER = 8000
TIMEOUT = aiohttp.ClientTimeout(total=300)


async def decode_steps(setup: Setup, system: System, vocabulary: int, figures: dict[str, Any]) -> None:
    """Add to `figures` for each executor of vLLM and batch: milliseconds between the tokens of streams that
    the decode server has without a proxy, before, while and after pulls follow each other, and what was
    pulled. Then the same while the prefill server computes as many of these prompts and lends none: what its
    steps cost the decode's, where both have one GPU.
    """
    for executor in EXECUTORS:
        own = replace(
            setup,
            arguments=(*setup.arguments, "--distributed-executor-backend", executor),
            prefill_arguments=("--enable-prefix-caching",),
        )
        async with running(system, own) as fleet:
            for batch in BATCHES:
                found = await _beside_pulls(fleet, batch, vocabulary)
                print(f"{executor}, batch {batch}: {json.dumps(found)}", flush=True)
                figures[f"{executor}, batch {batch}"] = found


async def _beside_pulls(fleet: Running, batch: int, vocabulary: int) -> dict[str, Any]:
    times: list[list[float]] = [[] for _ in range(batch)]
    prompt = _prompt(LONG, vocabulary)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT, read_bufsize=1 << 20
    ) as http:
        streams = [
            asyncio.create_task(_stream(http, fleet.servers[1], _prompt(SHORT, vocabulary), own))
            for own in times
        ]
        try:
            async with asyncio.timeout(60):
                await _pulls(http, fleet.url, prompt, 1)
                while not all(times):
                    await asyncio.sleep(0.1)
            alone = [await _window(times)]
            before = await kv_moved("kvferry", fleet.servers[1])
            beside = await _window(times, _pulls(http, fleet.url, prompt, None))
            after = await kv_moved("kvferry", fleet.servers[1])
            alone.append(await _window(times))
            pulls = after.transfers - before.transfers
            assert pulls, "nothing was pulled"
            prefills = await _window(times, _prefills(http, fleet.servers[0], prompt, pulls / WINDOW_S))
            alone.append(await _window(times))
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
    nbytes = after.nbytes - before.nbytes
    return {
        "alone_ms": alone,
        "beside_ms": beside,
        "slower": _slower(beside, *alone[:2]),
        "pulls": pulls,
        "pulled_gb_s": round(nbytes / WINDOW_S / 1e9, 2),
        "beside_prefills_ms": prefills,
        "slower_by_prefills": _slower(prefills, *alone[1:]),
    }


def _slower(beside: dict[str, float], before: dict[str, float], after: dict[str, float]) -> float:
    """Contexts grow meanwhile, and steps with them: one window lies before and one after."""
    return round(beside["mean"] / ((before["mean"] + after["mean"]) / 2) - 1, 4)


async def _window(
    times: list[list[float]], beside: Coroutine[Any, Any, None] | None = None
) -> dict[str, float]:
    """What streams see within WINDOW_S, while something else goes on."""
    began = time.perf_counter()
    other = None if beside is None else asyncio.create_task(beside)
    try:
        await asyncio.sleep(WINDOW_S)
    finally:
        if other is not None:
            other.cancel()
            await asyncio.wait([other])
    if other is not None and not other.cancelled():
        other.result()
    inside = [[at for at in own if at >= began] for own in times]
    if min(map(len, inside)) < 2:
        raise AssertionError("a stream stood still, or has ended")
    gaps = np.concatenate([np.diff(own) for own in inside]) * 1e3
    mean = float(np.median([(own[-1] - own[0]) / (len(own) - 1) for own in inside])) * 1e3
    return {"mean": round(mean, 3), **quantiles(gaps)}


async def _pulls(http: aiohttp.ClientSession, url: str, prompt: list[int], rounds: int | None) -> None:
    async def one() -> None:
        left = rounds
        while left is None or left > 0:
            left = None if left is None else left - 1
            await _complete(http, url, prompt, 2)

    async with asyncio.TaskGroup() as group:
        for _ in range(PULLERS):
            group.create_task(one())


async def _prefills(http: aiohttp.ClientSession, url: str, prompt: list[int], rate: float) -> None:
    """So many a second, whose KV nobody asks for."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(_complete(http, url, prompt, 1))
            await asyncio.sleep(1 / rate)


async def _complete(http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise AssertionError(f"{response.status} {(await response.text())[:300]}")
        await response.read()


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
