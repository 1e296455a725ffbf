# SPDX-License-Identifier: Apache-2.0
"""What vLLM's NixlConnector gets wrong with layers that keep a window or a chunk (seen with 0.32.0).

The decode server loads all N tokens of a prompt and then computes the last one again, whose window begins one
token before the window that was kept. Ours computes exactly one token more than it loads, and serves as the
control (`test_breadth`). A test here that fails means that vLLM has mended it.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.helpers.client import session
from tests.system.vllm.servers import MARKS, VllmServer, together, vllm_server
from tests.system.vllm.test_breadth import Drawn, draw, hand_over, models, prompt_ids

__all__ = ["models"]
pytestmark = MARKS

EXACT, OFF = (64, 100, 128), (95, 127, 159)
"""With blocks of 32 and a window of 64: at the second, N − W + 1 is a multiple of the block."""
LEAST_ERROR = 1e-4
"""Of a logprob; what float32 rounds is a hundredth of it."""


async def pair(stack: AsyncExitStack, tmp_path: Path, model: Path) -> tuple[VllmServer, VllmServer]:
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    prefill, decode = await together(
        stack, *(vllm_server(name, role, tmp_path, model=model) for name, role in roles.items())
    )
    return prefill, decode


async def handed_over(
    http: aiohttp.ClientSession, prefill: VllmServer, decode: VllmServer, ids: list[int]
) -> Drawn:
    _, params = await draw(http, prefill.url, ids, 1, hand_over())
    found, _ = await draw(http, decode.url, ids, params=params)
    return found


async def test_a_window_that_lost_a_block_gives_other_logprobs(models: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, session() as http:
        prefill, decode = await pair(stack, tmp_path, models / "gemma3")
        errors = {}
        for length in (*EXACT, *OFF):
            ids = prompt_ids(length)
            wanted, _ = await draw(http, prefill.url, ids)
            found = await handed_over(http, prefill, decode, ids)
            errors[length] = abs(found.logprobs[0] - wanted.logprobs[0])
        print(errors)
        assert all(errors[length] < LEAST_ERROR for length in EXACT)
        assert all(errors[length] > LEAST_ERROR for length in OFF)


async def test_a_prompt_of_whole_chunks_ends_the_decode_server(models: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack, session() as http:
        prefill, decode = await pair(stack, tmp_path, models / "llama4")
        wanted, _ = await draw(http, prefill.url, prompt_ids(100))
        assert (await handed_over(http, prefill, decode, prompt_ids(100))).ids == wanted.ids
        with pytest.raises((aiohttp.ClientError, KeyError, TimeoutError)):
            async with asyncio.timeout(60):
                await handed_over(http, prefill, decode, prompt_ids(64))
        with pytest.raises((aiohttp.ClientError, KeyError, TimeoutError)):
            async with asyncio.timeout(30):
                await draw(http, decode.url, prompt_ids(100))
