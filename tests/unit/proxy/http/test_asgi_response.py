# SPDX-License-Identifier: Apache-2.0
"""A response over ASGI's `send`: back-pressure, and clients that disconnect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.proxy.http.asgi_response import PAUSE_BYTES, AsgiResponse
from kvferry.proxy.http.client_connection import ClientResponse

WAIT_S = 20.0


class SlowServer:
    """An ASGI server whose client reads nothing until `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.leaves = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        await self.reads.wait()


async def test_a_client_that_does_not_read_pauses_and_is_let_go() -> None:
    server, paused = SlowServer(), list[bool]()

    async def serve(response: ClientResponse) -> None:
        response.on_pause = paused.append
        response.start(200, ())
        await asyncio.sleep(0)
        response.write(b"x" * PAUSE_BYTES)
        assert not paused
        response.write(b"y")
        assert paused == [True]
        server.reads.set()
        async with asyncio.timeout(WAIT_S):
            while paused == [True]:
                await asyncio.sleep(0)
        assert paused == [True, False]
        server.reads.clear()
        response.write(b"z")
        await asyncio.sleep(WAIT_S)

    async with asyncio.timeout(WAIT_S):
        await AsgiResponse(server.receive, server.send, stall_s=0.5).serve(serve)
    start, piece, last = server.sent
    assert start["type"] == "http.response.start"
    assert piece["body"] == b"x" * PAUSE_BYTES + b"y" and piece["more_body"] and last["body"] == b"z"


@pytest.mark.parametrize("in_body", [True, False], ids=["in its body", "later"])
async def test_a_client_that_disconnects_cancels_the_handler(in_body: bool) -> None:
    messages = [] if in_body else [{"type": "http.request", "body": b"abc"}]
    messages.append({"type": "http.disconnect"})
    cancelled, sent = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def serve(response: ClientResponse) -> None:
        try:
            assert await response.read_body(100) == b"abc"
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            assert response.is_disconnected
            cancelled.set()

    async with asyncio.timeout(WAIT_S / 2):
        await AsgiResponse(receive, send, stall_s=WAIT_S).serve(serve)
    assert cancelled.is_set() and not sent


async def test_an_aborted_response_is_not_completed() -> None:
    """The server then closes the connection."""
    server = SlowServer()
    server.reads.set()

    async def serve(response: ClientResponse) -> None:
        response.start(200, ())
        await asyncio.sleep(0.01)
        response.abort()

    await AsgiResponse(server.receive, server.send, stall_s=WAIT_S).serve(serve)
    assert [message["type"] for message in server.sent] == ["http.response.start"]
