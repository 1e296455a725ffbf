# SPDX-License-Identifier: Apache-2.0
"""Conversations: a prefill server pulls what a decode server has kept of earlier turns."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from kvferry.deploy.launcher import start_process
from tests.chaos.victims import stopped
from tests.helpers.client import session
from tests.helpers.commands import PROXY
from tests.system.vllm.servers import MARKS, MODEL, STOP_TIMEOUT_S, VllmServer, together, vllm_server
from tests.system.vllm.test_kvferry import FAILED, IN_USE, TRANSFERS

TURNS = 8
FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 160, 40, 56
BLOCK = 32
KEPT_S = 30.0
WORDS = (
    *("--keep-turns-s", str(KEPT_S), "--prefix-pull-min-tokens", str(BLOCK)),
    *("--prefill-policy", "round_robin", "--decode-policy", "round_robin"),
)
PULLS, BYTES = "vllm:kvferry_prefix_pulls_total", "vllm:kvferry_prefix_pull_bytes_total"
FAILED_PULLS = "vllm:kvferry_failed_prefix_pulls_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")

pytestmark = MARKS


@dataclass(frozen=True, slots=True)
class Fleet:
    prefill: list[VllmServer]
    decode: list[VllmServer]
    url: str
    http: aiohttp.ClientSession

    async def ask(self, url: str, prompt: list[int], **fields: Any) -> list[int]:
        """Return the answer's ids, greedy."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True} | fields
        async with self.http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            ids: list[int] = (await response.json())["choices"][0]["token_ids"]
            return ids

    async def alone(self, prompt: list[int]) -> list[int]:
        """Return the answer of a server that computes all of it."""
        return await self.ask(self.prefill[0].url, prompt, cache_salt=secrets.token_hex(8))

    async def total(self, servers: list[VllmServer], name: str, labels: str = "") -> int:
        return int(sum([await server.sample(self.http, name, labels) for server in servers]))

    async def counted(self) -> Counter[str]:
        """Prompt tokens of the prefill servers by source, and what was pulled."""
        sources = {each: await self.total(self.prefill, BY_SOURCE, f'source="{each}"') for each in SOURCES}
        pulled = {
            "pulls": await self.total(self.prefill, PULLS),
            "bytes": await self.total(self.prefill, BYTES),
        }
        return Counter(sources | pulled)

    async def until_free(self) -> None:
        """Wait until nothing is kept any more: vLLM frees blocks with a step."""
        async with asyncio.timeout(KEPT_S + 30):
            for server in (*self.prefill, *self.decode):
                while await server.sample(self.http, IN_USE) > 0:
                    await self.ask(server.url, [5], max_tokens=2)
                    await asyncio.sleep(0.5)


@asynccontextmanager
async def started(log_dir: Path, each: int = 1, **settings: Any) -> AsyncIterator[Fleet]:
    """A proxy, and so many prefill and decode servers."""
    async with AsyncExitStack() as stack:
        words = (*PROXY, "--decode-only-fallback", "false", *WORDS)
        proxy = await start_process("proxy", words, log_dir)
        stack.push_async_callback(proxy.stop)
        told: dict[str, Any] = {"log_dir": log_dir, "proxy": f"127.0.0.1:{proxy.listening['discovery_port']}"}
        servers = await together(
            stack,
            *(vllm_server(f"prefill-{at}", "kv_producer", **told, **settings) for at in range(each)),
            *(vllm_server(f"decode-{at}", "kv_consumer", **told, **settings) for at in range(each)),
        )
        http = await stack.enter_async_context(session())
        fleet = Fleet(servers[:each], servers[each:], proxy.url, http)
        async with asyncio.timeout(60):
            while True:
                async with http.get(f"{proxy.url}/nodes") as response:
                    nodes = (await response.json())["nodes"]
                if [node["state"] for node in nodes] == ["ready"] * 2 * each:
                    break
                await asyncio.sleep(0.2)
        yield fleet


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(count)]


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("transfer", ["tcp", "nixl"])
async def test_a_turn_computes_what_is_new(transfer: str, each: int, tmp_path: Path) -> None:
    """With two of each, who take turns, what a prefill server lacks is a turn of the other one too."""
    async with started(tmp_path, each, transfer=transfer) as fleet:
        prompt = ids(FIRST_TOKENS, 1)
        for turn in range(TURNS):
            before = await fleet.counted()
            answer = await fleet.ask(fleet.url, prompt)
            did = await fleet.counted()
            did.subtract(before)
            print(f"{transfer} {each}+{each} turn {turn + 1}: prompt {len(prompt)}", dict(did))
            assert answer == await fleet.alone(prompt), turn
            assert did["pulls"] == (turn > 0) and (did["bytes"] > 0) == (turn > 0)
            if turn:
                known = (len(prompt) - QUESTION_TOKENS - 1) // BLOCK * BLOCK
                assert did["local_compute"] == len(prompt) - known
                assert did["local_cache_hit"] + did["external_kv_transfer"] == known
            prompt = [*prompt, *answer, *ids(QUESTION_TOKENS, 2 + turn)]
        assert await fleet.total(fleet.prefill, FAILED_PULLS) == 0
        assert await fleet.total(fleet.decode, FAILED) == 0
        assert await fleet.total(fleet.decode, TRANSFERS) == TURNS
        await fleet.until_free()


async def test_another_salt_finds_nothing_nor_is_kept_what_a_client_says_not_to(tmp_path: Path) -> None:
    async with started(tmp_path) as fleet:
        prompt = ids(FIRST_TOKENS, 1)
        answer = await fleet.ask(fleet.url, prompt, cache_salt="c", cache_ttl_s=0)
        await fleet.ask(fleet.url, [*prompt, *answer, *ids(QUESTION_TOKENS, 2)], cache_salt="c")
        assert await fleet.total(fleet.prefill, PULLS) == 0
        answer = await fleet.ask(fleet.url, prompt, cache_salt="a")
        longer = [*prompt, *answer, *ids(QUESTION_TOKENS, 2)]
        await fleet.ask(fleet.url, longer, cache_salt="b")
        assert await fleet.total(fleet.prefill, PULLS) == 0
        await fleet.ask(fleet.url, longer, cache_salt="a")
        assert await fleet.total(fleet.prefill, PULLS) == 1


@pytest.mark.parametrize("how", ["stopped", "killed", "ended"])
async def test_a_lender_that_is_not_there_costs_a_while_and_no_answer(how: str, tmp_path: Path) -> None:
    """The one of two decode servers that has the turn before is not there when the next turn is asked."""
    async with started(tmp_path, 2) as fleet:
        prompt = ids(FIRST_TOKENS, 1)
        before = [await server.sample(fleet.http, TRANSFERS) for server in fleet.decode]
        answer = await fleet.ask(fleet.url, prompt)
        after = [await server.sample(fleet.http, TRANSFERS) for server in fleet.decode]
        (lender,) = (at for at in range(2) if after[at] > before[at])
        prompt = [*prompt, *answer, *ids(QUESTION_TOKENS, 2)]
        wanted = await fleet.alone(prompt)
        server = psutil.Process(fleet.decode[lender].pid)
        family = [server, *server.children(recursive=True)]
        with stopped(family) if how == "stopped" else nullcontext():
            if how == "killed":
                fleet.decode[lender].kill()
            elif how == "ended":
                server.terminate()
                await asyncio.to_thread(psutil.wait_procs, family, STOP_TIMEOUT_S)
            assert await fleet.ask(fleet.url, prompt) == wanted
        # One that ends may have told the proxy, or not.
        assert await fleet.total(fleet.prefill, FAILED_PULLS) == 1 or how == "ended"
        assert await fleet.total(fleet.prefill, PULLS) == 0
