# SPDX-License-Identifier: Apache-2.0
"""Two proxies before three kinds of pairs, each with a model of its own: vLLM servers, SGLang servers and
kvferry's own agents. Under load, servers of each kind are drained and killed (`make test-sglang`, with vLLM
installed too).
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from kvferry.deploy.launcher import Process
from tests.helpers.client import Answer, complete, session
from tests.helpers.servers import free_port
from tests.system.conftest import MODEL
from tests.system.sglang.servers import ENVIRONMENT, MARKS, WORDS
from tests.system.sglang.test_agents import HANGS_S, SglangFleet, bodies
from tests.system.test_rolling import ROLES, Fleet, sigterm
from tests.system.vllm import servers as vllm
from tests.system.vllm.test_death import outcome

CLIENTS = 2
"""Of each model."""
MAX_RUNNING = 8
LEASE = ("--lease-s", "5")
LONG = 64
MODELS = {"own": MODEL, "vllm": "of-vllm", "sglang": "of-sglang"}
"""By the kind of their servers. All have the same weights."""
PAUSE_S = {True: 0.1, False: 0.5}
"""Of a client, after a request that was answered right or not: servers that start need time of the CPU."""
RESTARTS_S = 900.0
"""Of servers of three kinds that start at once, under load."""

pytestmark = [
    *MARKS,
    pytest.mark.skipif(not vllm.PYTHON.exists(), reason="vLLM is not installed: run `make test-vllm`"),
]
Found = Mapping[str, Counter[str]]
"""By kind, how requests have ended."""


class MixedFleet(SglangFleet):
    """Its roles are of the form KIND-prefill and KIND-decode; those without a kind are SGLang's."""

    environment = MappingProxyType({**vllm.ENVIRONMENT, **ENVIRONMENT})

    def agent_words(self, role: str, where: list[str]) -> tuple[str, ...]:
        kind, _, role = role.rpartition("-")
        if kind == "own":
            return Fleet.agent_words(self, role, where)
        if kind == "vllm":
            return (
                "-m", "kvferry.deploy", "agent", "--engine", "vllm", "--engine-python", str(vllm.PYTHON),
                "--model", str(self._model), "--served-model-name", MODELS[kind], "--role", role,
                "--port", str(free_port()), "--control-port", "0", *where, *self._agent_args,
                "--", *vllm.engine_words(MAX_RUNNING), "--enable-prefix-caching",
            )  # fmt: skip
        words = super().agent_words(role, where)
        at = words.index("--served-model-name") + 1
        return (*words[:at], MODELS["sglang"], *words[at + 1 :])

    def named(self, kind: str, role: str) -> str:
        """The agent of a kind and role."""
        wanted = role if kind == "sglang" else f"{kind}-{role}"
        return next(each for each in self.agents() if each.rpartition("-")[0] == wanted)


async def test_three_kinds_of_pairs_behind_one_proxy(tmp_path: Path) -> None:
    async with MixedFleet(tmp_path, LEASE, WORDS) as fleet, session() as http:
        others = [fleet.start_agent(f"{kind}-{role}") for kind in ("own", "vllm") for role in ROLES]
        await asyncio.gather(*others)
        await fleet.wait_ready()
        asked = {kind: [each | {"model": model} for each in bodies(LONG)] for kind, model in MODELS.items()}
        wanted = {
            kind: [await complete(http, fleet.urls[0], each) for each in asked[kind]] for kind in MODELS
        }
        same = {
            kind: [each.same() for each in wanted[kind]] == [each.same() for each in wanted["own"]]
            for kind in MODELS
        }
        print("the kinds answer alike:", same, flush=True)
        found: Found = {kind: Counter() for kind in MODELS}
        clients = [
            asyncio.create_task(client(http, fleet.urls[number % 2], asked[kind], wanted[kind], found[kind]))
            for kind in MODELS
            for number in range(CLIENTS)
        ]
        try:
            await answered(found, 16)
            for role, end in (("decode", kill), ("prefill", sigterm), ("prefill", kill), ("decode", sigterm)):
                failed = sum(num_failed(each) for each in found.values())
                await asyncio.gather(*(replaced(fleet, kind, role, end) for kind in MODELS))
                await answered(found, 16)
                print(
                    f"{role}: {end.__name__}", {kind: dict(each) for kind, each in found.items()}, flush=True
                )
                assert end is kill or sum(num_failed(each) for each in found.values()) == failed
        finally:
            for each in clients:
                each.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*clients)
        print({kind: dict(each) for kind, each in found.items()}, flush=True)
        assert not any(each["wrong"] or each["untyped"] for each in found.values())
        await fleet.freed(http)


def num_failed(found: Counter[str]) -> int:
    return found.total() - found["right"]


async def client(
    http: aiohttp.ClientSession,
    url: str,
    asked: list[dict[str, Any]],
    wanted: list[Answer],
    found: Counter[str],
) -> None:
    """Send one request after the other."""
    for each in itertools.cycle(range(len(asked))):
        ended = await outcome(http, url, asked[each], wanted[each])
        found[ended] += 1
        await asyncio.sleep(PAUSE_S[ended == "right"])


async def answered(found: Found, more: int) -> None:
    """Wait until so many more requests of each kind are answered right."""
    before = {kind: each["right"] for kind, each in found.items()}
    async with asyncio.timeout(HANGS_S):
        while any(found[kind]["right"] < before[kind] + more for kind in found):
            await asyncio.sleep(0.1)


async def replaced(
    fleet: MixedFleet, kind: str, role: str, end: Callable[[Process], Awaitable[None]]
) -> None:
    """Kill a server and start another, or drain it once there is another."""
    name = fleet.named(kind, role)
    process = fleet.processes[name]
    async with asyncio.timeout(RESTARTS_S):
        if end is sigterm:
            await fleet.start_agent(name.rpartition("-")[0])
            await fleet.wait_ready()
        del fleet.processes[name]
        await end(process)
        status = await process.process.wait()
        if end is kill:
            await fleet.start_agent(name.rpartition("-")[0])
            await fleet.wait_ready()
    assert status == (0 if end is sigterm else -signal.SIGKILL), name


async def kill(process: Process) -> None:
    process.process.kill()
