# SPDX-License-Identifier: Apache-2.0
"""Killed processes of vLLM servers, in the midst of a pull: nothing hangs, nothing leaks, the others go on.

`make test-vllm`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import psutil

from tests.helpers.client import Answer, RequestFailed, StreamCut, complete, heldout, session
from tests.helpers.metrics import PAGE_AGE_S, scrape, total
from tests.helpers.patience import patient
from tests.helpers.servers import paused
from tests.system.test_rolling import ROLES, Fleet
from tests.system.vllm.fleet import VllmFleet
from tests.system.vllm.servers import MARKS, MODEL

LEASE_S = 5.0
PULLS = 4
"""Requests whose KV is being read, or about to be, when the process is killed: half of them streams."""
OTHERS = 8
"""Requests that come just after its death."""
TITLES = {"worker": "VLLM::Worker", "engine": "VLLM::EngineCore", "api": "openai.api_server"}
"""A part of each process's command line."""
HANGS_S = patient(90.0)
"""After which a request, or a process that should have ended, counts as hung."""
ANSWERED = "vllm:request_success_total"
IN_USE = "vllm:kv_cache_usage_perc"

pytestmark = MARKS


def bodies(count: int) -> list[dict[str, Any]]:
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    plain = {"model": MODEL, "return_token_ids": False, "kvferry_timing": False, **sampling}
    return [
        {**plain, "prompt": prompt.prompt, "stream": bool(index % 2)}
        for index, prompt in enumerate(heldout(count))
    ]


async def test_any_process_of_either_server_is_killed_in_the_midst_of_a_pull(tmp_path: Path) -> None:
    """A third server, which serves both legs, goes on throughout; what was killed is started again."""
    asked = bodies(OTHERS)
    async with VllmFleet(tmp_path, ("--lease-s", str(LEASE_S)), OTHERS) as fleet, session() as http:
        await fleet.start_agent("both")
        await fleet.wait_ready()
        spare = fleet.processes[fleet.agents()[-1]].url
        wanted = [await complete(http, spare, salted(body)) for body in asked]
        for role in ROLES:
            for kind in TITLES:
                pulls, found = await struck(fleet, http, role, kind, asked, wanted)
                freed_s = await wait_freed(fleet)
                what = f"{role}'s {kind} killed in {pulls} pulls"
                print(f"{what}: {dict(found)}, blocks free {freed_s:.1f} s later", flush=True)
                assert not found["wrong"] and not found["untyped"]
                assert found["right, others"] == OTHERS, "they go on elsewhere"
                await fleet.start_agent(role)
                await fleet.wait_ready()


async def struck(
    fleet: Fleet,
    http: aiohttp.ClientSession,
    role: str,
    kind: str,
    asked: list[dict[str, Any]],
    wanted: list[Answer],
) -> tuple[int, Counter[str]]:
    """Kill one process of the server with that role, and see all of it end.

    Return how many prompts' KV was being read, and a count of how requests end.
    """
    proxy = fleet.urls[0]
    names = {name.partition("-")[0]: name for name in fleet.agents()}
    prefill, decode, spare = (fleet.processes[names[each]] for each in (*ROLES, "both"))
    victim = fleet.processes.pop(names[role])
    family = psutil.Process(victim.pid).children(recursive=True)
    answered = await counted(prefill.url, ANSWERED)
    with paused(pids_of(decode.pid, "worker")):
        await turn(http, proxy, spare.url, "cordon")
        # The engine goes on: one that is stopped for longer than a few seconds stops announcing itself.
        pulling = [
            asyncio.create_task(outcome(http, proxy, *each))
            for each in zip(asked[:PULLS], wanted, strict=False)
        ]
        async with asyncio.timeout(HANGS_S):
            while await counted(prefill.url, ANSWERED) < answered + PULLS:
                await asyncio.sleep(0.05)
        async with asyncio.timeout(HANGS_S):
            while not (pulls := (await node_of(http, proxy, decode.url))["load"]["running"]):
                await asyncio.sleep(0.05)
        await turn(http, proxy, spare.url, "uncordon")
        for pid in pids_of(victim.pid, kind):
            os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(HANGS_S):
        others = [outcome(http, proxy, *each) for each in zip(asked, wanted, strict=True)]
        found = Counter([f"{each}, others" for each in await asyncio.gather(*others)])
        found.update(await asyncio.gather(*pulling))
        assert await victim.process.wait() == 1
        while any(map(runs, family)):  # one fate
            await asyncio.sleep(0.1)
    return pulls, found


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; who reaps it does not matter."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def wait_freed(fleet: Fleet) -> float:
    """Wait until no server has a block in use: a lease and a second, and what its figures are late by."""
    begun = time.monotonic()
    async with asyncio.timeout(patient(LEASE_S + 1 + PAGE_AGE_S)):
        for name in fleet.agents():
            while await counted(fleet.processes[name].url, IN_USE) > 0:
                await asyncio.sleep(0.1)
    return time.monotonic() - begun


async def outcome(http: aiohttp.ClientSession, url: str, body: dict[str, Any], wanted: Answer) -> str:
    """`right`, `wrong`, the code of a typed error, or `untyped`."""
    try:
        answer = await complete(http, url, salted(body))
    except RequestFailed as error:
        return str(error.error.get("code") or "untyped")
    except (aiohttp.ClientError, StreamCut):
        return "untyped"
    return "right" if answer.same() == wanted.same() else "wrong"


def pids_of(agent: int, kind: str) -> list[int]:
    """The processes of that kind that `kvferry agent` has started."""
    family = psutil.Process(agent).children(recursive=True)
    return [each.pid for each in family if TITLES[kind] in " ".join(each.cmdline())]


async def node_of(http: aiohttp.ClientSession, proxy: str, url: str) -> dict[str, Any]:
    async with http.get(f"{proxy}/nodes") as response:
        nodes: list[dict[str, Any]] = (await response.json())["nodes"]
    return next(node for node in nodes if node["address"] == url)


async def turn(http: aiohttp.ClientSession, proxy: str, url: str, how: str) -> None:
    """Have the proxy send no more requests to a server, or have it send them again."""
    incarnation = (await node_of(http, proxy, url))["incarnation"]
    async with http.post(f"{proxy}/nodes/{quote(incarnation, safe='/:')}/{how}") as response:
        assert response.status == 200, await response.text()


async def counted(url: str, name: str) -> float:
    return total(await scrape(url), name)


def salted(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, whose prompt is in no prefix cache."""
    return {**body, "cache_salt": secrets.token_hex(8)}
