# SPDX-License-Identifier: Apache-2.0
"""vLLM servers with data-parallel ranks: each rank is an agent of the proxy's, and all end together.

`make test-vllm`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import psutil
import pytest

from kvferry.deploy.launcher import start_process
from tests.helpers.client import heldout, session
from tests.helpers.commands import PROXY
from tests.helpers.metrics import scrape, total
from tests.helpers.servers import descendants
from tests.helpers.waiting import patient
from tests.system.vllm.servers import MARKS, MODEL, VllmServer, together, vllm_server
from tests.system.vllm.test_death import node_of
from tests.system.vllm.test_kvferry import (
    ENDED,
    FAILED,
    GENERATED,
    RECOMPUTED,
    STARVED_LEASE_S,
    STARVED_PROXY,
    TRANSFERS,
    Stack,
    answers,
    assert_all_equal,
    body,
    salted,
)

PROMPTS = 30
RETRIES = "kvferry_proxy_retries_total"
TURNS = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin")
"""So that each rank has its share: by what they measure, the slower of two would have less."""
GONE_S = patient(20.0)
DRAINED = 8
LONG = 200
"""Tokens of answers that are being decoded when a server is drained."""

pytestmark = MARKS


async def with_ranks(stack: AsyncExitStack, log_dir: Path, dp: tuple[int, int]) -> Stack:
    """A proxy, and two servers of so many data-parallel ranks, of which it knows each."""
    words = (*PROXY, "--decode-only-fallback", "false", *STARVED_PROXY, *TURNS)
    proxy = await start_process("proxy", words, log_dir)
    stack.push_async_callback(proxy.stop)
    discovery = f"127.0.0.1:{proxy.listening['discovery_port']}"
    servers = [
        vllm_server(
            name,
            role,
            log_dir,
            lease_s=STARVED_LEASE_S,
            proxy=discovery,
            words=("--data-parallel-size", str(ranks)) if ranks > 1 else (),
        )
        for name, role, ranks in zip(("prefill", "decode"), ("kv_producer", "kv_consumer"), dp, strict=True)
    ]
    prefill, decode = await together(stack, *servers)
    http = await stack.enter_async_context(session())
    async with asyncio.timeout(60):
        while await ready(http, proxy.url) != Counter(prefill=dp[0], decode=dp[1]):
            await asyncio.sleep(0.1)
    return Stack(prefill, decode, proxy.url, http)


async def ready(http: aiohttp.ClientSession, proxy_url: str) -> Counter[str]:
    """How many agents of each role can serve."""
    async with http.get(f"{proxy_url}/nodes") as response:
        nodes = (await response.json())["nodes"]
    return Counter(node["role"] for node in nodes if node["state"] == "ready")


async def by_rank(server: VllmServer, http: aiohttp.ClientSession, name: str, ranks: int) -> list[float]:
    """The samples of a metric, by data-parallel rank."""
    return [await server.sample(http, name, f'engine="{rank}"') for rank in range(ranks)]


@pytest.mark.parametrize("dp", [(2, 1), (1, 2), (2, 2)], ids=["2to1", "1to2", "2to2"])
async def test_data_parallel_servers_answer_as_one_server_does(dp: tuple[int, int], tmp_path: Path) -> None:
    """As the prefill server does when it is asked directly, which computes all by itself."""
    prompts = [prompt.prompt for prompt in heldout(PROMPTS)]
    async with AsyncExitStack() as resources:
        stack = await with_ranks(resources, tmp_path, dp)
        rounds = 0
        for chat in (False, True):
            for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 11, "n": 3}):
                bodies = [body(prompt, chat) | sampling for prompt in prompts]
                wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in bodies])
                assert len({str(answer.texts) for answer in wanted}) > PROMPTS // 2
                for stream in (False, True):
                    asked = [salted(each) | {"stream": stream} for each in bodies]
                    assert_all_equal(await answers(stack.http, stack.proxy_url, asked), wanted)
                    rounds += 1
        assert await stack.moved() == (rounds * PROMPTS, 0)
        lent = await by_rank(stack.prefill, stack.http, ENDED, dp[0])
        pulled = await by_rank(stack.decode, stack.http, TRANSFERS, dp[1])
        retried = total(await scrape(stack.proxy_url), RETRIES)
        print(f"prompts by prefill rank {lent}, by decode rank {pulled}, {retried:.0f} prefills asked again")
        assert sum(pulled) == rounds * PROMPTS <= sum(lent) <= rounds * PROMPTS + retried
        for counts in (lent, pulled):
            assert min(counts) > rounds * PROMPTS / (2 * len(counts)), "each has its share"
        assert await stack.decode.sample(stack.http, FAILED) == 0
        assert await stack.decode.sample(stack.http, RECOMPUTED) == 0
        if dp == (1, 2):
            await drained_by_its_second_rank(stack, prompts)


async def drained_by_its_second_rank(stack: Stack, prompts: list[str]) -> None:
    """All ranks of the decode server get nothing more, and finish what they have."""
    plain = {"model": MODEL, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    long = [plain | {"prompt": prompt} for prompt in prompts[:DRAINED]]
    wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in long])
    before = await by_rank(stack.decode, stack.http, GENERATED, 2)
    asked = [salted(each) | {"stream": True} for each in long]
    asking = asyncio.create_task(answers(stack.http, stack.proxy_url, asked, DRAINED))
    async with asyncio.timeout(GONE_S):
        while any(
            now < then + DRAINED
            for now, then in zip(await by_rank(stack.decode, stack.http, GENERATED, 2), before, strict=True)
        ):
            await asyncio.sleep(0.05)
    second = await node_of(stack.http, stack.proxy_url, f"{stack.decode.url}#1")
    url = f"{stack.proxy_url}/nodes/{quote(second['incarnation'], safe='/:')}/drain"
    async with stack.http.post(url) as response:
        assert response.status == 202, await response.text()
    assert not asking.done()
    assert_all_equal(await asking, wanted)
    async with asyncio.timeout(GONE_S):
        while await ready(stack.http, stack.proxy_url) != Counter(prefill=1):
            await asyncio.sleep(0.1)
    assert runs(stack.decode.pid), "it was started by hand"
    assert await stack.decode.sample(stack.http, RECOMPUTED) == 0


async def test_the_ranks_of_a_server_end_together(tmp_path: Path) -> None:
    """Whichever process is killed: vLLM ends the server of a rank that is dead, and an engine of ours whose
    API is.
    """
    for killed in ("rank", "api"):
        async with AsyncExitStack() as resources:
            stack = await with_ranks(resources, tmp_path, (1, 2))
            engines = [pid for pid in descendants(stack.decode.pid) if "EngineCore" in name_of(pid)]
            assert len(engines) == 2
            os.kill(engines[1] if killed == "rank" else stack.decode.pid, signal.SIGKILL)
            async with asyncio.timeout(GONE_S):
                while any(map(runs, (*engines, stack.decode.pid))):
                    await asyncio.sleep(0.1)
                while await ready(stack.http, stack.proxy_url) != Counter(prefill=1):
                    await asyncio.sleep(0.1)
            asked: dict[str, Any] = body("x", chat=False)
            async with stack.http.post(f"{stack.proxy_url}/v1/completions", json=asked) as response:
                assert response.status == 503


def name_of(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
