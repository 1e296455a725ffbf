# SPDX-License-Identifier: Apache-2.0
"""`python -m proxy` as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.standins.agents import StandInAgent

BODY = {"model": "stand-in", "prompt": "p", "max_tokens": 3}


@asynccontextmanager
async def process(*args: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvferry.proxy", "--port", "0", "--discovery-port", "0", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        line = await asyncio.wait_for(child.stdout.readline(), 20)
        yield child, json.loads(line)["listening"]
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_told_to_stop_and_exits_0(signum: signal.Signals) -> None:
    async with process() as (child, listening):
        async with (
            StandInAgent("both", (f"127.0.0.1:{listening['discovery_port']}",)) as agent,
            aiohttp.ClientSession() as http,
        ):
            await agent.until(lambda: agent.acks)
            async with http.post(f"{listening['url']}/v1/completions", json=BODY) as response:
                assert response.status == 200
        child.send_signal(signum)
        assert await asyncio.wait_for(child.wait(), 5) == 0


async def test_a_stop_in_mid_stream_ends_the_stream_and_drops_the_kv() -> None:
    """What outlasts `--drain-s` is cut; the prefill agent is told before the process ends."""
    async with process("--drain-s", "0.2") as (child, listening):
        where = (f"127.0.0.1:{listening['discovery_port']}",)
        async with (
            StandInAgent("prefill", where) as prefill,
            StandInAgent("decode", where, interval_s=30.0) as decode,
            aiohttp.ClientSession() as http,
        ):
            for agent in (prefill, decode):
                await agent.until(lambda agent=agent: agent.acks)
            body = {**BODY, "stream": True}
            async with http.post(f"{listening['url']}/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                await decode.until(lambda: decode.running)
                child.send_signal(signal.SIGTERM)
                await decode.until(lambda: decode.aborted)
                await prefill.until(lambda: prefill.dropped)
        assert await asyncio.wait_for(child.wait(), 5) == 0


async def test_a_taken_port_ends_it_with_a_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvferry.proxy",
            "--port", str(taken.getsockname()[1]), "--discovery-port", "0",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await asyncio.wait_for(child.communicate(), 20)
    assert child.returncode == 1
    assert b"address already in use" in said.lower()
