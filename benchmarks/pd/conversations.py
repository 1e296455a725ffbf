# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns: the first token of each, and what is computed and moved for it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import numpy as np

from benchmarks.pd.fleet import KINDS, MODEL, Setup, System, proxied, ready_nodes, servers_running, url_of
from benchmarks.pd.load import quantiles
from kvferry.proxy.wire.registration import Role
from tests.helpers.metrics import is_shown, scrape, total
from tests.helpers.servers import free_port

CONVERSATIONS, TURNS = 15, 8
"""An odd number: where two prefill servers are used in turn, each turn of a conversation has the other one.
"""
GAP_S = 0.3
"""Between the questions of two conversations in a turn; a turn begins when all have their answers."""
FIRST, QUESTION, ANSWER = 4096, 256, 256
"""Tokens of the first question, of each further one and of each answer."""
ANSWER_S = 120.0
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
PULLED = ("vllm:kvferry_prefix_pulls_total", "vllm:kvferry_prefix_pull_bytes_total")
FAILED = "vllm:kvferry_failed_prefix_pulls_total"


async def converse(
    systems: Sequence[System], setup: Setup, vocabulary: int, found: dict[str, dict[str, Any]]
) -> None:
    """Hold the same number of conversations with each system. Half of the servers, one on each of the
    setup's GPUs, only prefill; ours are the same for all of our systems that have the same backend.

    The figures go to `found`: of all turns of a system, and of each.
    """
    half = len(setup.gpus) // 2
    roles: list[Role] = ["prefill" if at < half else "decode" for at in range(2 * half)]
    for seed, group in enumerate(_sharing(systems)):
        ports, discovery_port = [free_port() for _ in roles], free_port()
        urls = [url_of(port) for port in ports]
        words: list[str] = []
        if KINDS[group[0]].connector == "nixl":
            words = [word for role, url in zip(roles, urls, strict=True) for word in (f"--{role}", url)]
        async with servers_running(group[0], setup, roles, ports, discovery_port):
            for at, system in enumerate(group):
                async with proxied(system, setup, discovery_port, words) as url:
                    await ready_nodes(url, len(roles))
                    rng = random.Random(1000 * seed + at)
                    found[system] = await _held(url, urls[:half], vocabulary, rng)
                print(f"{system}: {json.dumps(found[system])}", flush=True)


def _sharing(systems: Sequence[System]) -> Iterator[list[System]]:
    """Yield the systems that have the same servers together."""
    groups: dict[tuple[Any, ...], list[System]] = {}
    for system in systems:
        groups.setdefault(KINDS[system][:2], []).append(system)
    yield from groups.values()


async def _held(url: str, prefill: Sequence[str], vocabulary: int, rng: random.Random) -> dict[str, Any]:
    def words(number: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(number)]

    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        # Connections are made, and kernels chosen.
        await asyncio.gather(*[_ask(http, url, words(FIRST), 0.0) for _ in range(4 * len(prefill))])
        prompts = [words(FIRST) for _ in range(CONVERSATIONS)]
        turns, waits = [], list[float]()
        for _ in range(TURNS):
            before = await _counted(prefill)
            asked = [_ask(http, url, prompt, GAP_S * at) for at, prompt in enumerate(prompts)]
            answers = await asyncio.gather(*asked)
            did = await _counted(prefill)
            did.subtract(before)
            ttft = [each for each, _ in answers]
            waits += ttft
            turns.append(
                {
                    "prompt tokens of each": len(prompts[0]),
                    "ttft_s": quantiles(np.array(ttft)),
                    "of each, mean": {name: round(did[name] / len(prompts), 1) for name in sorted(did)},
                }
            )
            ids = [await _ids(http, prefill[0], text) for _, text in answers]
            prompts = [
                [*prompt, *answer, *words(QUESTION)] for prompt, answer in zip(prompts, ids, strict=True)
            ]
    return {"requests": len(waits), "ttft_s": quantiles(np.array(waits)), "turns": turns}


async def _ask(http: aiohttp.ClientSession, url: str, prompt: list[int], after_s: float) -> tuple[float, str]:
    """Ask a question later, and return the seconds until its first token, and the answer."""
    await asyncio.sleep(after_s)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True}
    text, first = "", 0.0
    sent = time.perf_counter()
    async with http.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line[6:])
            assert "error" not in told, told
            for choice in told["choices"]:
                first = first or time.perf_counter() - sent
                text += choice["text"]
    return first, text


async def _ids(http: aiohttp.ClientSession, server: str, text: str) -> list[int]:
    """The ids of a text: an answer with ids would begin with a token of the decode server."""
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    async with http.post(f"{server}/tokenize", json=body) as response:
        response.raise_for_status()
        tokens: list[int] = (await response.json())["tokens"]
        return tokens


async def _counted(servers: Sequence[str]) -> Counter[str]:
    """Prompt tokens by source, and what was pulled, of all of them; what they do not count is left out."""
    counted = Counter[str]()
    for page in [await scrape(url) for url in servers]:
        if is_shown(page, BY_SOURCE):
            counted.update({source: int(total(page, BY_SOURCE, source=source)) for source in SOURCES})
        counted.update({name: int(total(page, name)) for name in (*PULLED, FAILED) if is_shown(page, name)})
    return counted
