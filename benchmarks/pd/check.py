# SPDX-License-Identifier: Apache-2.0
"""Whether a pair answers as one plain server does, and when it reads too late."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from benchmarks.pd.fleet import MODEL, Setup, System, running
from tests.helpers.client import heldout
from tests.helpers.metrics import scrape, total
from tests.helpers.servers import descendants, paused

TOKENS = 16
LOGPROB_GAP = 0.1
"""Two servers whose batches differ may choose differently between tokens that lie so close."""
LEASE_S = 2.0
LATE_BATCH = 5
STOP_WITHIN_S = 0.06
FILLERS = 6
NUM_BLOCKS = 160
CONCURRENCY = 8
TIMEOUT = aiohttp.ClientTimeout(total=300)

LEASES_ENDED = "vllm:kvferry_leases_ended_total"
RECOMPUTED = "vllm:kvferry_recomputed_total"
TRANSFERS = "vllm:kvferry_transfers_total"


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]


async def same_answers(
    setup: Setup, systems: Sequence[System], num_prompts: int, found: dict[str, dict[str, Any]]
) -> None:
    """Put into `found` how many greedy answers of each system equal a plain server's, and as the control how
    many of its own do if fewer prompts are asked at once: in 16 bits an answer depends on what is computed
    beside it. The first token of another lies within LOGPROB_GAP of the plain server's (`ties`), or does not
    (`wrong`).
    """
    prompts = [prompt.prompt for prompt in heldout(num_prompts)]
    async with running("plain", setup) as fleet:
        wanted = await _answers(fleet.url, prompts)
        again = await _answers(fleet.url, prompts, at_once=CONCURRENCY // 2)
        found["plain, fewer at once"] = _compared(again, wanted)
    for system in systems:
        async with running(system, setup) as fleet:
            answers = await _answers(fleet.url, prompts)
            page = await scrape(fleet.servers[-1])
        found[system] = {
            "prompts": num_prompts,
            **_compared(answers, wanted),
            "transfers": total(page, TRANSFERS),
            "recomputed": total(page, RECOMPUTED),
        }


async def late_readers(setup: Setup, system: System, trials: int) -> dict[str, Any]:
    """The decode engine is stopped at some moment of a request, for longer than its lease; other prompts
    overwrite the blocks; it goes on. How many answers are those of before, and as the control how many are
    when nothing is stopped: in 16 bits an answer may depend on what is computed beside it.
    """
    prompts = [prompt.prompt for prompt in heldout(trials)]
    short = replace(
        setup,
        arguments=(*setup.arguments, "--num-gpu-blocks-override", str(NUM_BLOCKS)),
        settings={**setup.settings, "lease_s": LEASE_S},
    )
    found: list[Answer] = []
    async with running(system, short) as fleet:
        wanted = await _answers(fleet.url, prompts)
        again = await _answers(fleet.url, prompts, at_once=LATE_BATCH)
        for first in range(0, trials, LATE_BATCH):
            batch = prompts[first : first + LATE_BATCH]
            found += await _late(fleet.url, fleet.servers[0], fleet.pids[1], batch)
        expired = total(await scrape(fleet.servers[0]), LEASES_ENDED, reason="expired")
        recomputed = total(await scrape(fleet.servers[1]), RECOMPUTED)
    return {
        "trials": trials,
        **_compared(found, wanted),
        "leases expired": expired,
        "recomputed": recomputed,
        "nothing stopped": _compared(again, wanted),
    }


async def _late(url: str, prefill: str, decode_pid: int, prompts: list[str]) -> list[Answer]:
    asking = asyncio.create_task(_answers(url, prompts))
    await asyncio.sleep(random.uniform(0, STOP_WITHIN_S))
    with paused(descendants(decode_pid)):
        await asyncio.sleep(LEASE_S + 0.5)
        fillers = [f"{number} " * 480 for number in range(FILLERS)]
        await _answers(prefill, fillers, tokens=1)
    return await asking


async def _answers(
    url: str, prompts: Sequence[str], tokens: int = TOKENS, at_once: int = CONCURRENCY
) -> list[Answer]:
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:

        async def one(prompt: str) -> Answer:
            body = {
                "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 5,
                "cache_salt": secrets.token_hex(8),
            }  # fmt: skip
            async with gate, http.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise AssertionError(f"{response.status} {(await response.text())[:300]}")
                logprobs = (await response.json())["choices"][0]["logprobs"]
            columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
            return Answer(*(tuple(column) for column in columns))

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def _compared(found: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, int]:
    """How many answers are equal, differ between tokens that lie close, and differ otherwise."""
    gaps = [gap for pair in zip(found, wanted, strict=True) if (gap := _gap(*pair)) is not None]
    ties = sum(gap <= LOGPROB_GAP for gap in gaps)
    return {"equal": len(found) - len(gaps), "ties": ties, "wrong": len(gaps) - ties}


def _gap(found: Answer, wanted: Answer) -> float | None:
    """By how much the first token that differs was less likely than the other; None if none differs."""
    for index, (token, other) in enumerate(zip(found.tokens, wanted.tokens, strict=False)):
        if token != other:
            return abs(wanted.logprobs[index] - wanted.top[index].get(token, float("-inf")))
    return None if len(found.tokens) == len(wanted.tokens) else float("inf")
