# SPDX-License-Identifier: Apache-2.0
"""SGLang servers started by `kvferry agent --engine sglang`: killed while their KV is moved or their answers
are decoded, and drained (`make test-sglang`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import aiohttp
import psutil

from tests.helpers.client import Answer, complete, heldout, session
from tests.helpers.servers import free_port
from tests.system.sglang.servers import (
    ENVIRONMENT,
    MARKS,
    MODEL,
    PYTHON,
    START_TIMEOUT_S,
    WORDS,
    SglangServer,
)
from tests.system.sglang.test_kvferry import in_use
from tests.system.test_rolling import sigterm
from tests.system.vllm.fleet import EngineFleet
from tests.system.vllm.test_death import outcome, runs

LEASE_S = 2
REQUESTS = 8
LONG = 200
HANGS_S = 120.0
LATE_READ_S = 2.0
"""So long each read waits before it begins: in that time servers are killed."""
TITLES = ("sglang::scheduler", "sglang::detokenizer", "sglang.launch_server")
"""Of the processes of a server: its ranks, what makes texts of tokens, and the API."""
MOMENTS = (
    ("prefill", "prefill_inflight_queue_reqs", "its KV is moved"),
    ("decode", "decode_transfer_queue_reqs", "it reads KV"),
)
FREED_S = LEASE_S + 1 + 10
"""A lease and a second, and what a busy machine takes."""

pytestmark = MARKS


class SglangFleet(EngineFleet):
    """Of SGLang servers."""

    engine = "sglang"
    python = PYTHON
    environment: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**ENVIRONMENT, "KVFERRY_TEST_LATE_READ_S": str(LATE_READ_S)}
    )
    start_timeout_s = START_TIMEOUT_S

    def agent_words(self, role: str, where: list[str]) -> tuple[str, ...]:
        own = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
        if role == "prefill":
            own = ("--disaggregation-bootstrap-port", str(free_port()))
        return (*super().agent_words(role, where), *own)

    def of(self, role: str) -> list[str]:
        return [name for name in self.agents() if name.startswith(role)]

    def server(self, name: str) -> SglangServer:
        process = self.processes[name]
        return SglangServer(process.url, process.pid, self._log_dir / f"{name}.log")

    async def freed(self, http: aiohttp.ClientSession) -> None:
        """Wait until no SGLang server has a request, or a page in use."""
        async with asyncio.timeout(FREED_S):
            for name in (*self.of("prefill"), *self.of("decode")):
                while any(in_use(load := await self.server(name).load(http)).values()):
                    print(name, in_use(load), flush=True)
                    await asyncio.sleep(0.5)


def bodies(max_tokens: int) -> list[dict[str, Any]]:
    plain = {"return_token_ids": False, "kvferry_timing": False, "temperature": 0, "ignore_eos": True}
    return [
        {"model": MODEL, "prompt": each.prompt, "max_tokens": max_tokens, "stream": bool(number % 2), **plain}
        for number, each in enumerate(heldout(REQUESTS))
    ]


async def test_servers_that_are_killed_or_drained_break_nothing_else(tmp_path: Path) -> None:
    async with SglangFleet(tmp_path, ("--lease-s", str(LEASE_S)), WORDS) as fleet, session() as http:
        url, asked = fleet.urls[0], bodies(LONG)
        wanted = await asyncio.gather(*(complete(http, url, each) for each in asked))
        assert len({str(each.same()) for each in wanted}) > REQUESTS // 2
        await asyncio.gather(fleet.start_agent("prefill"), fleet.start_agent("decode"))
        await fleet.wait_ready()

        for title, (role, queue, moment) in product(TITLES, MOMENTS):
            found = await struck(fleet, http, fleet.of(role)[0], title, queue, asked, wanted)
            print(f"{title} of a {role} server killed while {moment}: {dict(found)}", flush=True)
            assert not found["wrong"] and not found["untyped"]
            await fleet.freed(http)
            await goes_on(http, url, asked[0], wanted[0])
            again = [outcome(http, url, *each) for each in zip(asked, wanted, strict=True)]
            assert Counter(await asyncio.gather(*again)) == {"right": REQUESTS}, "the others serve"
            await fleet.start_agent(role)
            await fleet.wait_ready()

        # A drain loses nothing.
        asking = [outcome(http, url, *each) for each in zip(asked, wanted, strict=True)]
        answers = asyncio.gather(*asking)
        victim = fleet.of("decode")[0]
        await busy(fleet.server(victim), http, "num_running_reqs")
        process = fleet.processes.pop(victim)
        await sigterm(process)
        async with asyncio.timeout(HANGS_S):
            assert Counter(await answers) == {"right": REQUESTS}
            assert await process.process.wait() == 0
        await fleet.freed(http)


async def goes_on(http: aiohttp.ClientSession, url: str, asked: dict[str, Any], wanted: Answer) -> None:
    """Wait until a request is answered: circuit breakers have closed again."""
    async with asyncio.timeout(HANGS_S):
        while await outcome(http, url, asked, wanted) != "right":
            await asyncio.sleep(0.2)


async def busy(server: SglangServer, http: aiohttp.ClientSession, queue: str) -> None:
    """Wait until a server has requests in a queue."""
    async with asyncio.timeout(HANGS_S):
        while not in_use(await server.load(http))[queue]:
            await asyncio.sleep(0.02)


async def struck(
    fleet: SglangFleet,
    http: aiohttp.ClientSession,
    victim: str,
    title: str,
    queue: str,
    asked: list[dict[str, Any]],
    wanted: list[Answer],
) -> Counter[str]:
    """Kill processes of a server once it has requests in a queue; see all of the server end.

    Return a count of how the requests end.
    """
    server, process = fleet.server(victim), fleet.processes.pop(victim)
    family = psutil.Process(process.pid).children(recursive=True)
    asking = [outcome(http, fleet.urls[0], *each) for each in zip(asked, wanted, strict=True)]
    answers = asyncio.gather(*asking)
    await busy(server, http, queue)
    killed = server.processes(title)
    assert killed
    for pid in killed:
        psutil.Process(pid).kill()
    async with asyncio.timeout(HANGS_S):
        found = Counter(await answers)
        assert await process.process.wait() == 1
        while any(map(runs, family)):  # one fate
            await asyncio.sleep(0.1)
    return found
