# SPDX-License-Identifier: Apache-2.0
"""A real vLLM decode server reads KV after its lease has ended, when its blocks have gone to other prompts.

By itself it answers HTTP 200 with wrong tokens (the control). Behind the proxy every answer is right, or a
typed 503, whatever `--nixl-lease-s` says (`make test-vllm`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.deploy.launcher import start_process
from tests.helpers.client import session
from tests.helpers.commands import PROXY
from tests.system.conftest import wait_ready
from tests.system.vllm.servers import (
    FILLERS,
    LATE_POOL,
    MARKS,
    MODEL,
    VllmServer,
    fillers,
    late_prompts,
    vllm_server,
)

TRIALS = 100
BATCH = 20
"""Prompts whose KV waits at the same time."""
WRONG_ALONE = 10
"""At least so many of the control's: which blocks the other prompts get is vLLM's choice."""
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"

pytestmark = MARKS

Ask = Callable[[dict[str, Any]], Awaitable[str]]


@pytest.mark.parametrize(
    ("lease_s", "prefix_cache"),
    [(3, False), (3, True), (6, False), (30, False)],
    ids=["3", "3, prefix cache", "6", "30"],
)
async def test_no_answer_is_drawn_from_recycled_blocks(
    lease_s: int, prefix_cache: bool, tmp_path: Path
) -> None:
    """A prefix cache keeps what the decode server has read, also of answers that the proxy discards."""
    bodies = [
        {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16}
        for prompt in late_prompts(TRIALS)
    ]
    async with (
        vllm_server(
            "prefill", "kv_producer", tmp_path, lease_s=lease_s, num_blocks=LATE_POOL, max_running=FILLERS
        ) as prefill,
        vllm_server("decode", "kv_consumer", tmp_path, lease_s=lease_s, prefix_cache=prefix_cache) as decode,
        session() as http,
    ):
        pair = (prefill, decode)
        async with proxy(pair, tmp_path, "reference") as url:
            wanted = [await through(http, url)(body) for body in bodies]
        assert len(set(wanted)) > TRIALS // 2, "prompts of which answers differ"

        async def late(ask: Ask, count: int, salt: str) -> Counter[str]:
            """What became of so many late reads. No other run has left anything under the salt."""
            before = await prefill.sample(http, EXPIRED)
            outcomes: Counter[str] = Counter()
            for first in range(0, count, BATCH):
                asked = [body | {"cache_salt": salt} for body in bodies[first : first + BATCH]]
                answers = await late_batch(http, pair, lease_s, ask, asked)
                for answer, right in zip(answers, wanted[first:], strict=False):
                    wrong = answer if answer.startswith("503 ") else "wrong"
                    outcomes["right" if answer == right else wrong] += 1
            assert await prefill.sample(http, EXPIRED) - before >= count, "every lease has expired"
            return outcomes

        control = await late(by_hand(http, pair), TRIALS, "alone")
        print(f"lease {lease_s} s, vLLM alone: {dict(control)}", flush=True)
        assert control["wrong"] >= WRONG_ALONE
        flags = {"unset": (), "too long": (str(10 * lease_s),), "right": (str(lease_s),)}
        for name, value in flags.items():
            words = [word for each in value for word in ("--nixl-lease-s", each)]
            async with proxy(pair, tmp_path, name.replace(" ", "-"), *words) as url:
                outcomes = await late(through(http, url), TRIALS, name)
            print(f"lease {lease_s} s, --nixl-lease-s {name}: {dict(outcomes)}", flush=True)
            assert outcomes.total() == TRIALS and not outcomes["wrong"]


async def late_batch(
    http: aiohttp.ClientSession,
    pair: tuple[VllmServer, VllmServer],
    lease_s: int,
    ask: Ask,
    bodies: list[dict[str, Any]],
) -> list[str]:
    """Ask while the decode engine stands still, recycle the prefill server's blocks, and let it go on."""
    prefill, decode = pair
    with decode.engine_stopped():
        before = await prefill.sample(http, EXPIRED)
        asking = [asyncio.ensure_future(ask(body)) for body in bodies]
        async with asyncio.timeout(3 * lease_s + 60):
            while await prefill.sample(http, EXPIRED) < before + len(bodies):
                await asyncio.sleep(0.1)
        await asyncio.gather(*map(through(http, prefill.url), fillers()))
    return await asyncio.gather(*asking)


def through(http: aiohttp.ClientSession, url: str) -> Ask:
    """Requests to a proxy; an error is its status and code."""

    async def ask(body: dict[str, Any]) -> str:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                return f"{response.status} {answer['error']['code']}"
            return str(answer["choices"][0]["text"])

    return ask


def by_hand(http: aiohttp.ClientSession, pair: tuple[VllmServer, VllmServer]) -> Ask:
    """The two legs as vLLM's own example proxy sends them."""
    prefill, decode = pair
    unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    hand_over = {"do_remote_decode": True, "do_remote_prefill": False, **unknown}

    async def ask(body: dict[str, Any]) -> str:
        leg = {**body, "max_tokens": 1, "kv_transfer_params": hand_over}
        async with http.post(f"{prefill.url}/v1/completions", json=leg) as response:
            params = (await response.json())["kv_transfer_params"]
        leg = {**body, "kv_transfer_params": params}
        async with http.post(f"{decode.url}/v1/completions", json=leg) as response:
            answer = await response.json()
            return str(answer["choices"][0]["text"]) if response.status == 200 else f"{response.status}"

    return ask


@asynccontextmanager
async def proxy(
    pair: tuple[VllmServer, VllmServer], log_dir: Path, name: str, *words: str
) -> AsyncIterator[str]:
    """A proxy before the pair; yields its URL once it is ready."""
    servers = ("--prefill", pair[0].url, "--decode", pair[1].url, "--dialect", "vllm-nixl")
    argv = (*PROXY, *servers, "--decode-only-fallback", "false", *words)
    process = await start_process(f"proxy-{name}", argv, log_dir)
    try:
        await wait_ready(process)
        yield process.url
    finally:
        await process.stop()
