# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers behind the proxy answer as one plain vLLM server does (`make test-vllm`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.deploy.launcher import start_process
from tests.helpers.client import complete_all, heldout, session
from tests.helpers.commands import PROXY
from tests.system.conftest import wait_ready
from tests.system.vllm.servers import MARKS, MODEL, VllmServer, vllm_server

PROMPTS = 50
CONCURRENCY = 4
MOVED = "vllm:nixl_xfer_time_seconds_count"
TROUBLE = (
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_failed_notifications_total",
    "vllm:nixl_num_kv_expired_reqs_total",
)

pytestmark = MARKS


@dataclass(frozen=True, slots=True)
class Stack:
    """The plain server, the pair, and the proxy before the pair."""

    plain: VllmServer
    prefill: VllmServer
    decode: VllmServer
    proxy_url: str


async def started(stack: AsyncExitStack, tmp_path: Path) -> Stack:
    """Start everything: the servers one after the other, for each takes all cores while it starts."""
    plain = await stack.enter_async_context(vllm_server("plain", None, tmp_path))
    prefill = await stack.enter_async_context(vllm_server("prefill", "kv_producer", tmp_path))
    decode = await stack.enter_async_context(vllm_server("decode", "kv_consumer", tmp_path))
    words = ("--prefill", prefill.url, "--decode", decode.url, "--dialect", "vllm-nixl")
    alone = ("--decode-only-fallback", "false")
    proxy = await start_process("proxy", (*PROXY, *words, *alone), tmp_path)
    stack.push_async_callback(proxy.stop)
    await wait_ready(proxy)
    return Stack(plain, prefill, decode, proxy.url)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Stack]:
    async with AsyncExitStack() as stack:
        yield await started(stack, tmp_path)


async def test_a_pair_answers_as_one_server_does_and_the_kv_has_moved(servers: Stack) -> None:
    base = [
        {"model": MODEL, "prompt": prompt.prompt, "temperature": 0, "max_tokens": 16}
        for prompt in heldout(PROMPTS)
    ]
    wanted = await _texts(servers.plain.url, base)
    assert len(set(wanted)) > PROMPTS // 2, "prompts of which answers differ"
    async with session() as http:
        for stream in (False, True):
            for n in (1, 4):
                before = await servers.decode.sample(http, MOVED)
                bodies = [{**body, "stream": stream, "n": n} for body in base]
                assert await _texts(servers.proxy_url, bodies) == [text * n for text in wanted], (stream, n)
                moved = await servers.decode.sample(http, MOVED) - before
                assert moved >= PROMPTS * n, f"only {moved} transfers (stream={stream}, n={n})"
        for name in TROUBLE:
            assert await servers.prefill.sample(http, name) == await servers.decode.sample(http, name) == 0, (
                name
            )


async def _texts(url: str, bodies: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The texts of every answer's choices, in order."""
    texts = []
    for answer in await complete_all(url, bodies, CONCURRENCY):
        if isinstance(answer, Exception):
            raise answer
        texts.append(tuple(choice.text for _, choice in sorted(answer.choices.items())))
    return texts
