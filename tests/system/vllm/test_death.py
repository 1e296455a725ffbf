# SPDX-License-Identifier: Apache-2.0
"""Killed processes of vLLM servers, while leases are held, KV is pulled, or answers are decoded: nothing
hangs, nothing leaks, the others go on.

`make test-vllm`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import psutil
import pytest

from tests.helpers.client import Answer, RequestFailed, StreamCut, complete, heldout, session
from tests.helpers.metrics import PAGE_AGE_S, scrape, total
from tests.helpers.servers import paused
from tests.helpers.waiting import patient
from tests.system.test_rolling import ROLES, Fleet
from tests.system.vllm.fleet import VllmFleet
from tests.system.vllm.servers import MARKS, MODEL
from tests.system.vllm.test_breadth import CASES, models, prompt_ids

LEASE_S = 5.0
CAUGHT = 4
"""Requests that are in the midst of it when a process is killed: half of them streams."""
CANDIDATES, PROMPT_TOKENS = 120, 96
OTHERS = 8
"""Requests that come just after its death."""
TITLES = {"worker": "VLLM::Worker", "engine": "VLLM::EngineCore", "api": "openai.api_server"}
"""A part of each process's command line."""
LONG = 400
"""Tokens of answers that are being decoded then."""
FLAGS = ("--lease-s", str(LEASE_S))
HANGS_S = patient(90.0)
"""After which a request, or a process that should have ended, counts as hung."""
ANSWERED = "vllm:request_success_total"
IN_USE = "vllm:kv_cache_usage_perc"

Asked = tuple[Sequence[dict[str, Any]], Sequence[Answer]]
"""Requests and the answers that they should get."""

__all__ = ["models"]
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
    async with VllmFleet(tmp_path, FLAGS, OTHERS) as fleet, session() as http:
        await killed(fleet, http, [(role, kind, "pulled") for role in ROLES for kind in TITLES])


@pytest.mark.parametrize(
    "name", ["gemma3", "gpt_oss", "llama4", "mistral", "nemotron_h", "deepseek_v3", "qwen3_next"]
)
async def test_any_process_of_servers_of_other_kinds_of_models_is_killed(
    name: str, models: Path, tmp_path: Path
) -> None:
    """Each role at each moment, and each kind of process at each.

    Where an answer rounds as its batch is, servers run one request at a time, and no answer is computed again
    from its middle on.
    """
    rounds = CASES[name].rounds
    moments = [
        *(("prefill", "worker", "held"), ("prefill", "engine", "pulled"), ("prefill", "api", "decoded")),
        ("decode", "worker", "pulled" if rounds else "decoded"),
        *(("decode", "engine", "held"), ("decode", "api", "pulled")),
    ]
    settings: dict[str, Any] = {"model": models / name, "words": CASES[name].words}
    slots = 1 if rounds else OTHERS
    async with VllmFleet(tmp_path, FLAGS, slots, **settings) as fleet, session() as http:
        await killed(fleet, http, moments, slots)


async def killed(
    fleet: VllmFleet,
    http: aiohttp.ClientSession,
    moments: Sequence[tuple[str, str, str]],
    slots: int = OTHERS,
) -> None:
    """Kill a process at each of these moments; `slots` is how many sequences a server runs at once."""
    await fleet.start_agent("both")
    await fleet.wait_ready()
    spare = fleet.processes[fleet.agents()[-1]].url
    asked = bodies(OTHERS) if slots > 1 else await steady(http, fleet.urls[0], spare)
    wanted = [await complete(http, spare, salted(body)) for body in asked]
    at_once = min(CAUGHT, slots)
    # The last of one is a stream.
    catch = slice(1, 2) if at_once == 1 else slice(at_once)
    long = [body | {"max_tokens": LONG} for body in asked[catch]]
    wanted_long = [await complete(http, spare, salted(body)) for body in long]
    for role, kind, moment in moments:
        caught = (long, wanted_long) if moment == "decoded" else (asked[catch], wanted[catch])
        running, found = await struck(fleet, http, role, kind, moment, caught, (asked, wanted), slots)
        freed_s = await wait_freed(fleet)
        what = f"{role}'s {kind} killed while {at_once} are {moment}, {running} running"
        print(f"{what}: {dict(found)}, blocks free {freed_s:.1f} s later", flush=True)
        assert not found["wrong"] and not found["untyped"]
        assert found["right, others"] == OTHERS, "they go on elsewhere"
        await fleet.start_agent(role)
        await fleet.wait_ready()


async def steady(http: aiohttp.ClientSession, proxy: str, spare: str) -> list[dict[str, Any]]:
    """Streams whose answers are the same when they come from the pair, and when the first token is computed
    as part of the prompt, as it is after a death: of other requests, a token that is nearly as likely as
    another may become the less likely one.
    """
    found: list[dict[str, Any]] = []
    with_ids = {"stream": False, "return_token_ids": True}
    await turn(http, proxy, spare, "cordon")
    for number, body in enumerate(bodies(CANDIDATES)):
        asked = body | {"prompt": prompt_ids(PROMPT_TOKENS, number), "stream": True}
        alone, pair = [await complete(http, url, salted(asked)) for url in (spare, proxy)]
        first, *rest = (await complete(http, spare, salted(asked | with_ids))).choices[0].token_ids
        longer = with_ids | {"prompt": [*asked["prompt"], first], "max_tokens": asked["max_tokens"] - 1}
        again = await complete(http, spare, salted(asked | longer))
        if alone.same() == pair.same() and again.choices[0].token_ids == rest:
            found.append(asked)
        if len(found) == OTHERS:
            break
    await turn(http, proxy, spare, "uncordon")
    assert len(found) == OTHERS, f"{len(found)} of {CANDIDATES} answers do not depend on rounding"
    return found


async def struck(
    fleet: Fleet,
    http: aiohttp.ClientSession,
    role: str,
    kind: str,
    moment: str,
    caught: Asked,
    others: Asked,
    slots: int,
) -> tuple[int, Counter[str]]:
    """Kill one process of the server with that role, and see all of it end.

    Return how many requests the decode server had blocks for, and a count of how requests end.
    """
    proxy = fleet.urls[0]
    names = {name.partition("-")[0]: name for name in fleet.agents()}
    prefill, decode, spare = (fleet.processes[names[each]] for each in (*ROLES, "both"))
    victim = fleet.processes.pop(names[role])
    family = psutil.Process(victim.pid).children(recursive=True)
    answered = await counted(prefill.url, ANSWERED)

    async def decode_runs(least: int) -> int:
        async with asyncio.timeout(HANGS_S):
            while (running := (await node_of(http, proxy, decode.url))["load"]["running"]) < least:
                await asyncio.sleep(0.05)
        return int(running)

    async with AsyncExitStack() as stack:
        if moment == "pulled":
            # The engine goes on: one that is stopped for longer than a few seconds stops announcing itself.
            stack.enter_context(paused(pids_of(decode.pid, "worker")))
        await turn(http, proxy, spare.url, "cordon")
        with paused(pids_of(prefill.pid, "worker") if moment == "held" else []):
            catching = [
                asyncio.create_task(outcome(http, proxy, *each)) for each in zip(*caught, strict=True)
            ]
            if moment == "held":
                # The proxy sends nothing to a server that is full: it chooses this one before.
                async with asyncio.timeout(HANGS_S):
                    while (await node_of(http, proxy, decode.url))["in_flight"] < len(caught[0]):
                        await asyncio.sleep(0.05)
                await stack.enter_async_context(all_slots_taken(http, decode.url, slots))
                await decode_runs(slots)
                # Else it might have served them all before the prefill server's figures say that it answered.
                stack.enter_context(paused(pids_of(decode.pid, "worker")))
        async with asyncio.timeout(HANGS_S):
            while await counted(prefill.url, ANSWERED) < answered + len(caught[0]):
                await asyncio.sleep(0.05)
        running = await decode_runs(1)
        await turn(http, proxy, spare.url, "uncordon")
        for pid in pids_of(victim.pid, kind):
            os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(HANGS_S):
        going_on = [outcome(http, proxy, *each) for each in zip(*others, strict=True)]
        found = Counter([f"{each}, others" for each in await asyncio.gather(*going_on)])
        found.update(await asyncio.gather(*catching))
        assert await victim.process.wait() == 1
        while any(map(runs, family)):  # one fate
            await asyncio.sleep(0.1)
    return running, found


@asynccontextmanager
async def all_slots_taken(http: aiohttp.ClientSession, url: str, slots: int) -> AsyncIterator[None]:
    """As many requests as a server runs at once; they are given up at the end."""

    async def ask(number: int) -> None:
        asked = {"model": MODEL, "prompt": f"{number}", "max_tokens": 900, "ignore_eos": True}
        async with http.post(f"{url}/v1/completions", json=asked) as response:
            await response.read()

    asking = [asyncio.create_task(ask(number)) for number in range(slots)]
    try:
        yield
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


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
