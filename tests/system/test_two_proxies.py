# SPDX-License-Identifier: Apache-2.0
"""Two independent proxies serve one fleet (docs/two-proxies.md). The agents are stand-ins that ping both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.deploy.launcher import Process, start_process
from tests.helpers.commands import PROXY
from tests.standins.agents import StandInAgent

BODY = {"model": "stand-in", "prompt": "once upon a time", "max_tokens": 6, "seed": 1}
DEADLINE_S = 20.0


@asynccontextmanager
async def proxies(log_dir: Path) -> AsyncIterator[tuple[Process, Process]]:
    async with AsyncExitStack() as stack:
        started = await asyncio.gather(*(start_process(name, PROXY, log_dir) for name in ("one", "other")))
        for process in started:
            stack.push_async_callback(process.stop)
        one, other = started
        yield one, other


async def text(http: aiohttp.ClientSession, proxy: Process, **fields: Any) -> str:
    async with http.post(f"{proxy.url}/v1/completions", json={**BODY, **fields}) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def nodes(http: aiohttp.ClientSession, proxy: Process) -> dict[str, dict[str, Any]]:
    async with http.get(f"{proxy.url}/nodes") as response:
        return {node["incarnation"]: node for node in (await response.json())["nodes"]}


async def test_two_proxies_serve_one_fleet_and_one_may_die(tmp_path: Path) -> None:
    async with proxies(tmp_path) as (one, other), aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        where = tuple(f"127.0.0.1:{proxy.listening['discovery_port']}" for proxy in (one, other))
        agents = [
            await stack.enter_async_context(StandInAgent(role, where))
            for role in ("prefill", "prefill", "decode", "decode")
        ]
        async with asyncio.timeout(DEADLINE_S):
            for proxy in (one, other):
                while len(await nodes(http, proxy)) < len(agents):
                    await asyncio.sleep(0.02)
        asked = [text(http, proxy, seed=seed) for seed in range(8) for proxy in (one, other)]
        answers = await asyncio.gather(*asked)
        assert answers[::2] == answers[1::2], "whoever is asked, the answer is the same"
        assert all(agent.asked for agent in agents[:2])

        # What this proxy has there is its own count; what all have there comes with the pings.
        decode = agents[2]
        decode.interval_s = agents[3].interval_s = 2.0  # the other's page may be a second old
        streams = [asyncio.ensure_future(text(http, one)) for _ in range(4)]
        async with asyncio.timeout(DEADLINE_S):
            while not sum([node["load"]["running"] for node in (await nodes(http, other)).values()]):
                await asyncio.sleep(0.02)
        assert not any(node["in_flight"] for node in (await nodes(http, other)).values())
        decode.interval_s = agents[3].interval_s = 0.0
        await asyncio.gather(*streams)

        # Each proxy must be asked.
        async with http.post(f"{one.url}/nodes/{decode.incarnation}/cordon") as response:
            assert response.status == 200
        assert (await nodes(http, one))[decode.incarnation]["state"] == "cordoned"
        assert (await nodes(http, other))[decode.incarnation]["state"] == "ready"

        one.process.kill()
        await one.process.wait()
        assert await asyncio.gather(*(text(http, other, seed=seed) for seed in range(8))) == answers[::2]
