# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers with `verify_kv`, and a bit flipped in KV after it was summed (`make test-vllm`).

Each is found, and its prompt computed by the decode server: no answer is wrong. The control is the same pair
without it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.client import heldout
from tests.standins.faults import tcp
from tests.system.vllm.servers import MARKS
from tests.system.vllm.test_kvferry import (
    CONCURRENCY,
    FAILED,
    RECOMPUTED,
    TRANSFERS,
    Stack,
    body,
    salted,
    started,
)
from tests.system.vllm.test_late_reader import through

pytestmark = MARKS

PROMPTS = 50
FLIPS = 1000
SOUND = 100
"""Transfers after those in which something is flipped."""
CONTROL = 100
WRONG_ALONE = 10
CHECKSUM = 'reason="checksum"'


async def test_1000_flipped_bits_make_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tcp.VARIABLE, f"bit:count={FLIPS}")
    async with started(tmp_path, **settings(1.0)) as stack:
        assert await wrong(stack, FLIPS + SOUND) == 0
        await stack.settled()
        found = {
            name: await stack.decode.sample(stack.http, name, label)
            for name, label in ((FAILED, CHECKSUM), (FAILED, ""), (RECOMPUTED, ""), (TRANSFERS, ""))
        }
        print(found, flush=True)
        assert await stack.decode.sample(stack.http, FAILED, CHECKSUM) == FLIPS
        assert await stack.moved() == (SOUND, FLIPS)


async def test_without_verification_such_a_bit_makes_wrong_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tcp.VARIABLE, "bit:")
    async with started(tmp_path, **settings(0.0)) as stack:
        count = await wrong(stack, CONTROL)
        print(f"{count} of {CONTROL} answers are wrong", flush=True)
        assert count >= WRONG_ALONE
        assert await stack.moved() == (CONTROL, 0)


def settings(share: float) -> dict[str, Any]:
    connector = {
        "kv_connector": "FaultyConnector",
        "kv_connector_module_path": "tests.standins.faulty_connector",
        "settings": {"verify_kv": share},
    }
    return {"transfer": "tcp", "connector": connector}


async def wrong(stack: Stack, count: int) -> int:
    """How many of so many answers by the pair are not those of the prefill server alone. Each prompt moves
    its KV. With logprobs a NaN is an error.
    """
    prompts = [prompt.prompt for prompt in heldout(PROMPTS)]
    bodies = [body(prompt, chat=False) | {"temperature": 0} for prompt in prompts]
    wanted = await ask(stack.http, stack.prefill.url, bodies)
    assert len(set(wanted)) > PROMPTS // 2
    found = await ask(stack.http, stack.proxy_url, [bodies[number % PROMPTS] for number in range(count)])
    differing = [(number, text) for number, text in enumerate(found) if text != wanted[number % PROMPTS]]
    for number, text in differing:
        print(f"{number}: {text!r}, not {wanted[number % PROMPTS]!r}", flush=True)
    return len(differing)


async def ask(http: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]]) -> list[str]:
    gate, one = asyncio.Semaphore(CONCURRENCY), through(http, url)

    async def gated(asked: dict[str, Any]) -> str:
        async with gate:
            return await one(salted(asked))

    return await asyncio.gather(*map(gated, bodies))
