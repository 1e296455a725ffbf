# SPDX-License-Identifier: Apache-2.0
"""Every vLLM server and both proxies are replaced twice, in turn, under load (`make test-vllm`)."""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path
from typing import Any

from kvferry.deploy.drain import drain
from kvferry.deploy.launcher import Process
from tests.helpers.client import heldout
from tests.helpers.metrics import scrape, total
from tests.system.test_rolling import (
    NONE,
    PROXIES,
    Body,
    check_killed,
    kill_all,
    loaded,
    sigterm,
    tried_again,
    trouble,
)
from tests.system.vllm.fleet import VllmFleet
from tests.system.vllm.servers import MARKS, MODEL

REQUESTS = int(os.environ.get("REQUESTS", "1000"))
"""At least: more are sent until all have been replaced."""
ROUNDS = 2
CONCURRENCY = 32
MAX_RUNNING = 16
"""Choices that a server computes at once; the others wait."""
LEASE = ("--lease-s", "20")
TRANSFERS = "vllm:kvferry_transfers_total"

pytestmark = MARKS


def asked() -> list[Body]:
    """Streams that begin early, others, and whole answers, some of them with several choices.

    Each time with a prompt that is in no prefix cache, so that its KV has to move.
    """

    def body(index: int, prompt: str) -> dict[str, Any]:
        is_stream = bool(index % 2)
        plain = {"return_token_ids": False, "kvferry_timing": False, "temperature": 0}
        return {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 48 if is_stream else 16,
            "ignore_eos": True,
            "stream": is_stream,
            "n": 3 if index % 5 == 0 else 1,
            "cache_salt": secrets.token_hex(8),
            **(plain if index % 4 == 1 and index % 5 else {"temperature": 1, "seed": index}),
        }

    prompts = [prompt.prompt for prompt in heldout(16)]
    return [functools.partial(body, index, prompt) for index, prompt in enumerate(prompts)]


async def test_all_are_replaced_and_no_request_is_lost_or_computed_twice(tmp_path: Path) -> None:
    """Servers by SIGTERM, one by a drain that a proxy was asked for, and then the proxies."""
    again: list[float] = []
    async with VllmFleet(tmp_path, LEASE, MAX_RUNNING) as fleet:

        async def through_a_proxy(process: Process) -> None:
            await drain(fleet.urls[0], process.url, None, None, fleet.deadline_s)

        async with loaded(fleet, CONCURRENCY, REQUESTS, asked()) as load:
            for _ in range(ROUNDS):
                for name in fleet.agents():
                    assert await fleet.replace(name, sigterm) == 0, name
                (decode,) = (name for name in fleet.agents() if name.startswith("decode"))
                assert await fleet.replace(decode, through_a_proxy) == 0
                for proxy in PROXIES:
                    again.append(tried_again(await scrape(fleet.processes[proxy].url)))
                    assert await fleet.replace(proxy, sigterm) == 0, proxy
        assert not load.failed, load.failed[:3]
        pages = [*fleet.pages, *[await scrape(fleet.processes[name].url) for name in fleet.agents()]]
        moved = sum(total(page, TRANSFERS) for page in pages)
        print(f"{load.answered} answered, {load.wrong} wrong, {moved:g} transfers, legs sent again {again}")
        assert await trouble(fleet, load) == NONE
        assert moved >= load.answered >= REQUESTS


async def test_all_are_killed_and_nothing_is_wrong_or_hangs(tmp_path: Path) -> None:
    """Who is cut off learns it: by a typed error, or since the connection to the killed proxy breaks."""
    async with VllmFleet(tmp_path, LEASE, MAX_RUNNING) as fleet:
        async with loaded(fleet, CONCURRENCY, REQUESTS, asked()) as load:
            for _ in range(ROUNDS):
                await kill_all(fleet, load)
        check_killed(load)
