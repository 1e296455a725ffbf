# SPDX-License-Identifier: Apache-2.0
"""A decode step while KV is pulled beside it and while none is, as clients see it."""

from __future__ import annotations

import asyncio
import random
import time
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


async def decode_steps(setup: Setup, system: System, vocabulary: int) -> dict[str, Any]:
    """For each executor of vLLM and batch: milliseconds between the tokens of streams that the decode server
    has without a proxy, before, while and after pulls follow each other, and what was pulled.
    """
    figures: dict[str, Any] = {}
    for executor in EXECUTORS:
        own = replace(
            setup,
            arguments=(*setup.arguments, "--distributed-executor-backend", executor),
            prefill_arguments=("--enable-prefix-caching",),
        )
        async with running(system, own) as fleet:
            for batch in BATCHES:
                figures[f"{executor}, batch {batch}"] = await _beside_pulls(fleet, batch, vocabulary)
    return figures


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
            pulling = asyncio.create_task(_pulls(http, fleet.url, prompt, None))
            try:
                beside = await _window(times)
            finally:
                pulling.cancel()
                await asyncio.wait([pulling])
            after = await kv_moved("kvferry", fleet.servers[1])
            alone.append(await _window(times))
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
    nbytes = after.nbytes - before.nbytes
    # Contexts grow meanwhile, and steps with them: one window lies before and one after.
    mean = (alone[0]["mean"] + alone[1]["mean"]) / 2
    return {
        "alone_ms": alone,
        "beside_ms": beside,
        "slower": round(beside["mean"] / mean - 1, 4),
        "pulls": after.transfers - before.transfers,
        "pulled_gb_s": round(nbytes / WINDOW_S / 1e9, 2),
    }


async def _window(times: list[list[float]]) -> dict[str, float]:
    began = time.perf_counter()
    await asyncio.sleep(WINDOW_S)
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
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise AssertionError(f"{response.status} {(await response.text())[:300]}")
                await response.read()

    async with asyncio.TaskGroup() as group:
        for _ in range(PULLERS):
            group.create_task(one())


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
