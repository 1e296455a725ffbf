# SPDX-License-Identifier: Apache-2.0
"""Accounting of streamed responses, however they end, and back-pressure of a client that does not read."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.proxy import sse
from kvferry.proxy.api.completions import ResponseWriter
from tests.helpers.waiting import until
from tests.standins.agents import Fault
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 5, "stream": True}


async def ask(stage: Stage, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A streamed request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.proxy.port, limit=4096)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    return reader, writer


async def until_counted(stage: Stage, status: str) -> None:
    """Wait until a request has ended with `status`."""
    line = f'kvferry_proxy_requests_total{{endpoint="completions",status="{status}"}}'
    await until(lambda: stage.metric(line), 10)


@pytest.mark.parametrize(("last", "status"), [(b"data: {", "499"), (sse.DONE.rstrip(), "200")])
async def test_a_client_is_served_once_it_has_done(stage: Stage, last: bytes, status: str) -> None:
    """Clients disconnect on `[DONE]` without waiting for the body's end: that counts as served."""
    _, decode = await stage.pair(interval_s=0.05)
    decode.faults.append(Fault("decode", "late_end"))
    reader, writer = await ask(stage, BODY)
    async with asyncio.timeout(10):
        await reader.readuntil(last)
    writer.close()
    await until_counted(stage, status)
    await writer.wait_closed()


async def test_a_client_that_does_not_read_slows_its_agent_and_is_disconnected(
    start_stage: StartStage,
) -> None:
    """Memory is bounded: back-pressure reaches the agent, and past a limit the client is disconnected."""
    stage = await start_stage(client_stall_s=0.5)
    wordy = "x" * 1024  # in every event, so that no socket buffer holds the whole stream
    agent = await stage.agent("both", model=wordy)
    _, writer = await ask(stage, {**BODY, "model": wordy, "max_tokens": 4000, "n": 8})
    await agent.until(lambda: agent.running)
    await until_counted(stage, "499")
    await agent.until(lambda: agent.aborted == 1)
    writer.transport.abort()


class FakeSource:
    """A source that notes whether it is paused."""

    def __init__(self) -> None:
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


def test_a_client_that_does_not_read_pauses_every_source() -> None:
    """The sub-requests of one request are read side by side; also a source that begins later waits."""
    response: Any = SimpleNamespace()
    writer = ResponseWriter(response, cast(Any, None), cast(Any, None))
    first, second, ended = FakeSource(), FakeSource(), FakeSource()
    with writer.throttling(ended):
        pass
    with writer.throttling(first):
        response.on_pause(True)
        with writer.throttling(second):
            assert first.is_paused and second.is_paused
            response.on_pause(False)
            assert not first.is_paused and not second.is_paused
    response.on_pause(True)
    assert not (first.is_paused or second.is_paused or ended.is_paused)
