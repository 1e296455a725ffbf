# SPDX-License-Identifier: Apache-2.0
"""`kvferry up --engine vllm` serves by real vLLM servers, and restarts one that dies (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import aiohttp

from tests.helpers.client import Answer, complete, heldout, session
from tests.helpers.metrics import scrape, total
from tests.helpers.waiting import patient
from tests.system.test_up import nodes, up
from tests.system.vllm.servers import ENVIRONMENT, MARKS, MODEL, PYTHON, START_TIMEOUT_S, engine_words

REQUESTS = 8
TRANSFERS = "vllm:kvferry_transfers_total"

pytestmark = MARKS


async def test_it_serves_by_vllm_and_restarts_a_server_that_dies(tmp_path: Path) -> None:
    # `kvferry up` itself divides the cores.
    environment = {name: value for name, value in ENVIRONMENT.items() if "OMP" not in name}
    options = ["--engine", "vllm", "--engine-python", str(PYTHON), "--agent.lease-s", "5"]
    options += [re.sub("^--", "--vllm.", word) for word in engine_words(REQUESTS)]

    async def transfers(_: aiohttp.ClientSession, __: str, decode: str) -> float:
        return total(await scrape(decode), TRANSFERS)

    with patch.dict(os.environ, environment):
        await check_up(tmp_path, options, transfers, START_TIMEOUT_S)


async def check_up(
    log_dir: Path,
    options: Sequence[str],
    transfers: Callable[[aiohttp.ClientSession, str, str], Awaitable[float]],
    start_timeout_s: float,
) -> None:
    """Have `kvferry up` with these options serve, and restart a decode server.

    `transfers` returns how many there have been, by the URLs of the proxy and of the decode server.
    """
    async with up(log_dir, *options) as cluster, session() as http:
        await cluster.until(r"decode-0 has been starting for \d+ s: \S", start_timeout_s)
        url = (await cluster.until(rf"serving {MODEL} at (\S+)/v1;", start_timeout_s))[1]
        bodies = [
            {
                "model": MODEL,
                "prompt": prompt.prompt,
                "max_tokens": 64,
                "temperature": 0,
                "ignore_eos": True,
                "stream": bool(index % 2),
                "return_token_ids": False,
                "kvferry_timing": False,
            }
            for index, prompt in enumerate(heldout(REQUESTS))
        ]
        expected = await asyncio.gather(*(complete(http, url, body) for body in bodies))
        servers = {node["name"]: node["address"] for node in await nodes(http, url)}
        assert [*sorted(servers)] == ["decode-0", "prefill-0"]
        assert await transfers(http, url, servers["decode-0"]) == REQUESTS

        os.kill(cluster.child("decode-0"), signal.SIGKILL)
        await cluster.until(r"decode-0 ended with -9", patient(30))
        await cluster.until(r"decode-0 is started again: process \d+", start_timeout_s)
        async with asyncio.timeout(patient(60)):
            while [node["state"] for node in await nodes(http, url)] != ["ready"] * 2:
                await asyncio.sleep(0.1)
        assert {node["name"]: node["address"] for node in await nodes(http, url)} == servers
        for body, same in zip(bodies, expected, strict=True):
            answer = await complete(http, url, body)
            assert isinstance(answer, Answer) and answer.same() == same.same()
