# SPDX-License-Identifier: Apache-2.0
"""D2: texts whose tokenizing stopped every other stream of an agent, and made it look dead."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import psutil
import pytest

from kvferry.deploy.launcher import Process
from tests.abuse.bystanders import SLACK_S, bystanders, control_run, send
from tests.system.conftest import StartAgent, StartCluster

MEGABYTES = 8_000_000
HEALTH_S = 0.5


def bodies() -> Mapping[str, tuple[str, bytes]]:
    """Path and body of each abusive request; all are within the limit of 8 MiB and can only be a 400."""

    def completion(prompt: str) -> tuple[str, bytes]:
        return "/v1/completions", json.dumps({"model": "ferry-tiny", "prompt": prompt}).encode()

    def chat(messages: list[dict[str, Any]]) -> tuple[str, bytes]:
        body = {"model": "ferry-tiny", "messages": messages}
        return "/v1/chat/completions", json.dumps(body, separators=(",", ":")).encode()

    return {
        "words": completion("ab cd " * (MEGABYTES // 6)),
        "spaces": completion(" " * MEGABYTES),
        "special tokens": completion("<|end|>" * (MEGABYTES // 7)),
        "one message": chat([{"role": "user", "content": "ab cd " * (MEGABYTES // 6)}]),
        "many messages": chat([{"role": "user", "content": "hello"}] * 190_000),
        "many parts": chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 250_000}]),
        "ids": ("/v1/completions", b'{"model":"ferry-tiny","prompt":[' + b"1," * 3_900_000 + b"1]}"),
    }


async def slowest_health(url: str, stop: asyncio.Event) -> float:
    slowest = 0.0
    async with aiohttp.ClientSession() as http:
        while not stop.is_set():
            began = time.monotonic()
            async with http.get(f"{url}/health") as response:
                assert response.status == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.02)
    return slowest


def resident(process: Process) -> int:
    root = psutil.Process(process.process.pid)
    return sum(each.memory_info().rss for each in (root, *root.children(recursive=True)))


@pytest.mark.timeout(240)
async def test_a_text_that_cannot_fit_stops_nobody(start_agent: StartAgent) -> None:
    """Once: every other stream stood still for 60 to 98 s."""
    # Made beforehand: making them takes a second, in which this process could not read what streams send.
    prepared = bodies()
    async with start_agent() as agent:
        control = await control_run(agent.url)
        before, stop = resident(agent), asyncio.Event()
        async with bystanders(agent.url) as gaps:
            health = asyncio.ensure_future(slowest_health(agent.url, stop))
            for name, (path, raw) in prepared.items():
                began = time.monotonic()
                status, body = await send(agent.url, raw, path)
                print(f"{name}: {time.monotonic() - began:.2f} s, {body['error']['message']}")
                assert (status, body["error"]["code"]) == (400, "context_length_exceeded"), name
                assert body["error"]["param"] in ("prompt", "messages")
            stop.set()
            slowest = await health
        print(
            f"control {control.longest:.2f} s, beside the abuse {gaps.longest:.2f} s, health {slowest:.2f} s"
        )
        assert gaps.longest < control.longest + SLACK_S
        assert slowest < control.longest + HEALTH_S
        assert resident(agent) - before < 4 * MEGABYTES


@pytest.mark.timeout(240)
async def test_no_agent_leaves_the_rotation_for_a_text(start_cluster: StartCluster) -> None:
    """Once: one such prompt walked through the fleet, and none was in rotation for half a minute."""
    path, raw = bodies()["words"]
    out: set[str] = set()

    async def watch(http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            async with http.get(f"{cluster.url}/nodes") as response:
                nodes = (await response.json())["nodes"]
            out.update(f"{node['address']}: {node['state']}" for node in nodes if node["state"] != "ready")
            await asyncio.sleep(0.1)

    async with start_cluster() as cluster, aiohttp.ClientSession() as http:
        stop = asyncio.Event()
        watching = asyncio.ensure_future(watch(http, stop))
        for _ in range(3):
            status, body = await send(cluster.url, raw, path)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        await asyncio.sleep(1.0)
        stop.set()
        await watching
    assert out == set()
