# SPDX-License-Identifier: Apache-2.0
"""`python -m proxy` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest

from kvferry.proxy.server import SETTLE_S
from kvferry.proxy.wire.registration import NODE_EXPIRY_S
from tests.standins.agents import StandInAgent

BODY = {"model": "stand-in", "prompt": "p", "max_tokens": 3}


MODULE = ("-m", "kvferry.proxy")
# As the module, but that agents have a minute to announce themselves: here they may be slow to start.
PATIENT = (
    "-c",
    "import sys; from kvferry.proxy import __main__ as proxy; proxy.SETTLE_S = 60.0; sys.exit(proxy.main())",
)


@asynccontextmanager
async def process(
    *args: str, program: Sequence[str] = MODULE
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, *program, "--port", "0", "--discovery-port", "0", *args,
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
        assert await asyncio.wait_for(child.wait(), 20) == 0


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
        assert await asyncio.wait_for(child.wait(), 20) == 0


@pytest.mark.parametrize("args", [(), ("--workers", "2")], ids=["one", "workers"])
async def test_requests_of_the_first_seconds_wait_for_the_agents(args: tuple[str, ...]) -> None:
    """A proxy that is replaced at its address gets requests before any agent has announced itself to it."""
    async with process(*args, program=PATIENT) as (_, listening), aiohttp.ClientSession() as http:
        asking = asyncio.ensure_future(http.post(f"{listening['url']}/v1/completions", json=BODY))
        await asyncio.sleep(0.3)
        assert not asking.done()
        where = (f"127.0.0.1:{listening['discovery_port']}",)
        async with StandInAgent("both", where), await asyncio.wait_for(asking, 20) as response:
            assert response.status == 200


@pytest.mark.parametrize("args", [(), ("--workers", "2")], ids=["one", "workers"])
async def test_after_the_first_seconds_they_wait_no_longer(args: tuple[str, ...]) -> None:
    assert SETTLE_S == NODE_EXPIRY_S  # of the module as it is: an agent that lives is heard by then
    async with process(*args) as (_, listening), aiohttp.ClientSession() as http:
        where = (f"127.0.0.1:{listening['discovery_port']}",)
        async with StandInAgent("both", where) as agent:
            await agent.until(lambda: agent.acks)
            wrong = {**BODY, "model": "unheard-of"}
            async with http.post(f"{listening['url']}/v1/completions", json=wrong) as response:
                assert response.status == 404
            async with http.post(f"{listening['url']}/v1/completions", json=BODY) as response:
                assert response.status == 200


@pytest.mark.parametrize("args", [(), ("--workers", "2")], ids=["one", "workers"])
async def test_sigterm_finishes_what_runs_and_takes_nothing_new(args: tuple[str, ...]) -> None:
    """A kept connection may send one more request, that was on its way; a new one is refused."""
    async with process(*args) as (child, listening):
        where = (f"127.0.0.1:{listening['discovery_port']}",)
        async with (
            StandInAgent("both", where, interval_s=0.2) as agent,
            aiohttp.ClientSession() as http,
        ):
            await agent.until(lambda: agent.acks)
            url = f"{listening['url']}/v1/completions"
            reader, writer = await asyncio.open_connection("127.0.0.1", listening["port"])
            async with http.post(url, json={**BODY, "max_tokens": 12, "stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                child.send_signal(signal.SIGTERM)
                async with asyncio.timeout(10):
                    while not await refused(listening["port"]):
                        pass
                body = json.dumps(BODY).encode()
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                late = await asyncio.wait_for(reader.read(), 20)
                assert late.startswith(b"HTTP/1.1 200") and b"connection: close" in late
                assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
            writer.close()
            assert await asyncio.wait_for(child.wait(), 20) == 0
            assert not agent.aborted


@pytest.mark.parametrize("args", [(), ("--workers", "2")], ids=["one", "workers"])
async def test_a_second_signal_ends_it_at_once(args: tuple[str, ...]) -> None:
    async with process(*args) as (child, listening):
        where = (f"127.0.0.1:{listening['discovery_port']}",)
        async with (
            StandInAgent("both", where, interval_s=2.0) as agent,
            aiohttp.ClientSession() as http,
        ):
            await agent.until(lambda: agent.acks)
            url = f"{listening['url']}/v1/completions"
            async with http.post(url, json={**BODY, "max_tokens": 100, "stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                child.send_signal(signal.SIGTERM)
                async with asyncio.timeout(10):
                    while not await refused(listening["port"]):
                        pass
                assert not agent.aborted
                child.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(child.wait(), 20) == 0
            await agent.until(lambda: agent.aborted)


async def test_connections_that_nobody_has_accepted_yet_are_served() -> None:
    """They stand in the system's queue when the proxy stops listening; closing it would reset them."""
    async with process() as (child, listening):
        where = (f"127.0.0.1:{listening['discovery_port']}",)
        async with StandInAgent("both", where) as agent:
            await agent.until(lambda: agent.acks)
            child.send_signal(signal.SIGSTOP)
            body = json.dumps(BODY).encode()
            ends = [await asyncio.open_connection("127.0.0.1", listening["port"]) for _ in range(40)]
            for _, writer in ends:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGCONT)
            for reader, writer in ends:
                assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")
                writer.close()
            assert await asyncio.wait_for(child.wait(), 20) == 0


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


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


@pytest.mark.parametrize("args", [(), ("--workers", "2")])
async def test_a_proxy_that_stood_still_loses_no_agent(args: tuple[str, ...]) -> None:
    """A machine that is paused, or has too much to do. The agents' pings wait to be read."""
    async with (
        process(*args) as (child, listening),
        StandInAgent("both", (f"127.0.0.1:{listening['discovery_port']}",)) as agent,
        aiohttp.ClientSession() as http,
    ):
        await agent.until(lambda: agent.acks)
        stopped = [child.pid, *(each.pid for each in psutil.Process(child.pid).children(recursive=True))]
        async with http.post(f"{listening['url']}/v1/completions", json=BODY) as response:
            assert response.status == 200
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        asking = [
            asyncio.ensure_future(http.post(f"{listening['url']}/v1/completions", json=BODY))
            for _ in range(8)
        ]
        await asyncio.sleep(NODE_EXPIRY_S + 1.0)
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        for response in await asyncio.gather(*asking):
            assert response.status == 200, await response.text()
            response.release()
        async with http.get(f"{listening['url']}/metrics") as response:
            page = await response.text()
        assert 'kvferry_proxy_agents_lost_total{role="both"} 0.0' in page
