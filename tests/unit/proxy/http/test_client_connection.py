# SPDX-License-Identifier: Apache-2.0
"""Limits of a client's connection before its request is known: a deadline and a size."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from kvferry.common.http.server import MAX_HEAD_BYTES, MAX_PIPELINED
from kvferry.proxy.exchange.attempt import Attempt
from kvferry.proxy.http.client_connection import ClientResponse
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.telemetry.request_log import RequestLog
from tests.helpers.waiting import until
from tests.standins.agents import Fault
from tests.unit.proxy.conftest import Stage, StartStage

BODY = json.dumps({"model": "stand-in", "prompt": "a b c", "max_tokens": 3}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Client:
    """One connection to a proxy."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def answer(self) -> tuple[int, bytes]:
        """The next answer's status and body."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """All that comes until the proxy closes the connection."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@asynccontextmanager
async def client_of(stage: Stage) -> AsyncIterator[Client]:
    """A connection without a request yet."""
    client = Client(*await asyncio.open_connection("127.0.0.1", stage.proxy.port))
    try:
        yield client
    finally:
        client.writer.transport.abort()


def padded(size: int) -> bytes:
    """A request whose head has that many bytes."""
    begin = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Pad: "
    return begin + b"a" * (size - len(begin) - 4) + b"\r\n\r\n"


TOO_MUCH = padded(MAX_HEAD_BYTES + 5)[: MAX_HEAD_BYTES + 1]
"""A head that exceeds the limit by one byte, so that nothing is left unread when it is rejected."""


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["at once", "after a request"])
@pytest.mark.parametrize("begun", [b"P", b"\r\n", HEALTH[:-2]], ids=["a byte", "a line's end", "half a head"])
async def test_a_head_that_does_not_come_is_a_408(
    start_stage: StartStage, first: bytes, begun: bytes
) -> None:
    """I5."""
    stage = await start_stage(body_timeout_s=0.2)
    async with client_of(stage) as client:
        client.send(first)
        assert not first or (await client.answer())[0] == 200
        client.send(begun)
        status, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (408, "head_timeout")
        assert await client.rest() == b""


async def test_an_idle_connection_is_closed(start_stage: StartStage) -> None:
    stage = await start_stage(body_timeout_s=0.2)
    async with client_of(stage) as client:
        assert await client.rest() == b""


async def test_a_client_that_goes_on_with_a_rejected_body_is_disconnected(start_stage: StartStage) -> None:
    """uvicorn waits for the next request from the answer on, but only until anything comes."""
    stage = await start_stage(body_timeout_s=0.2, max_body_bytes=1000)
    async with client_of(stage) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n")
        assert (await client.answer())[0] == 413
        client.send(b"{")
        assert await client.rest() == b""


async def test_the_head_deadline_does_not_apply_to_a_request_in_flight(start_stage: StartStage) -> None:
    """Also a client that ends its body with a line's end, as old ones do."""
    stage = await start_stage(body_timeout_s=0.2)
    gate = asyncio.Event()
    prefill = await stage.agent("prefill", prefill_gate=gate)
    await stage.agent("decode")
    async with client_of(stage) as client, client_of(stage) as idle:
        client.send(ASK + b"\r\n")
        await prefill.until(lambda: prefill.running)
        client.send(b"\r\n")
        async with client_of(stage) as later:
            for silent in (idle, later):
                assert await silent.rest() == b""
        gate.set()
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["at once", "after a request"])
async def test_a_head_has_a_size(stage: Stage, first: bytes) -> None:
    async with client_of(stage) as client:
        client.send(first)
        assert not first or (await client.answer())[0] == 200
        client.send(padded(MAX_HEAD_BYTES))
        assert (await client.answer())[0] == 200
        client.send(TOO_MUCH)
        status, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (431, "head_too_large")
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "head",
    [padded(2**20), b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 2**17 + b"\r\n"],
    ids=["one header", "many headers"],
)
async def test_a_head_of_a_mebibyte_is_rejected(stage: Stage, head: bytes) -> None:
    """One header costs the parser the square of its size, on the loop that relays all tokens."""
    async with client_of(stage) as client:
        client.send(head)
        try:
            response = await client.rest()
        except ConnectionResetError:  # how a connection ends of which not all was read
            return
        assert response.startswith(b"HTTP/1.1 431 ")


async def test_nor_are_trailers_of_a_mebibyte(stage: Stage) -> None:
    """They are headers too, for the parser."""
    async with client_of(stage) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(b"1\r\n{\r\n0\r\nX-Pad: " + b"a" * 2**20 + b"\r\n\r\n")
        with suppress(ConnectionResetError):
            assert await client.rest() == b""


async def test_chunks_of_a_body_may_be_more_than_a_head(stage: Stage) -> None:
    await stage.pair()
    body = json.dumps({**json.loads(BODY), "prompt": "x" * 4 * MAX_HEAD_BYTES}).encode()
    half = len(body) // 2
    async with client_of(stage) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for chunk in (body[:half], body[half:]):
            client.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        client.send(b"0\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_requests_in_a_row_may_be_more_than_a_head(stage: Stage) -> None:
    count = 100
    async with client_of(stage) as client:
        client.send(padded(1000) * count)
        assert [(await client.answer())[0] for _ in range(count)] == [200] * count


async def test_a_head_without_end_behind_a_request_ends_that_too(stage: Stage) -> None:
    """An error cannot be sent in the middle of another response."""
    prefill, _ = await stage.pair(faults=[Fault("prefill", "hang")])
    async with client_of(stage) as client:
        client.send(ASK)
        await prefill.until(lambda: prefill.running)
        client.send(TOO_MUCH)
        assert await client.rest() == b""
        await prefill.until(lambda: prefill.aborted == 1)


async def test_a_flood_of_pipelined_requests_ends_the_connection(stage: Stage) -> None:
    """D1: each took 2 KB here for 40 bytes sent, without an end."""
    async with client_of(stage) as client:
        client.send(HEALTH * 5000)
        with suppress(ConnectionResetError):
            assert (await client.rest()).count(b"HTTP/1.1 200") <= MAX_PIPELINED


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", [b"", b"Connection: keep-alive\r\n"], ids=["plain", "keep-alive"])
async def test_http_1_0_gets_no_chunks(stage: Stage, path: str, stream: bool, keeps: bytes) -> None:
    """F12: nothing frames a stream but the end of the connection (RFC 9112 §6.1)."""
    await stage.pair()
    chat = [{"role": "user", "content": "a b c"}]
    prompt = {"/v1/completions": {"prompt": "a b c"}, "/v1/responses": {"input": chat}}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields = {"model": "stand-in", limit: 3, "stream": stream, **prompt.get(path, {"messages": chat})}
    body = json.dumps(fields).encode()
    async with client_of(stage) as client:
        client.send(
            b"POST %b HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (path.encode(), keeps, len(body)) + body
        )
        head, _, answer = (await client.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    if stream:
        assert answer.endswith((b"}\n\n", b"}\n\ndata: [DONE]\n\n"))
        assert all(
            event.startswith((b"data: ", b"event: ")) for event in answer.removesuffix(b"\n\n").split(b"\n\n")
        )
    else:
        assert json.loads(answer)["model"] == "stand-in"


@pytest.mark.parametrize("path", [b"/health", b"/nodes", b"/metrics", b"/ui", b"/ui/ui.js", b"/missing"])
async def test_nor_does_any_other_page(stage: Stage, path: bytes) -> None:
    """F12."""
    async with client_of(stage) as client:
        client.send(b"GET %b HTTP/1.0\r\n\r\n" % path)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"content-length: %d\r\n" % len(body) in head


async def test_nor_do_the_events_of_the_page(stage: Stage) -> None:
    """F12: a stream of Quart's."""
    async with client_of(stage) as client:
        client.send(b"GET /ui/events HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert b"transfer-encoding" not in await client.reader.readuntil(b"\r\n\r\n")
            assert (await client.reader.readuntil(b"\n\n")).startswith(b"retry: ")
            assert (await client.reader.readuntil(b"\n\n")).startswith(b"data: ")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
async def test_a_websocket_upgrade_is_refused(
    stage: Stage, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """D7: it was a 500 with a traceback in the log."""
    # Other tests may leave INFO on, and pytest attaches its handler to uvicorn's access log, which has none.
    caplog.set_level(logging.WARNING)
    async with client_of(stage) as client:
        client.send(
            b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert (await client.answer())[0] == 426
    assert not caplog.records


async def test_a_request_leaves_nothing_to_the_garbage_collector(stage: Stage) -> None:
    """Its body waited there too, so that memory seemed to leak, and each request cost a tenth more."""

    def left() -> list[str]:
        kinds = (ClientRequest, ClientResponse, Attempt, RequestLog)
        # By type: objects of torch warn when `isinstance` looks at them.
        return [type(each).__name__ for each in gc.get_objects() if issubclass(type(each), kinds)]

    await stage.pair()
    async with client_of(stage) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                client.send(ASK)
                assert (await client.answer())[0] == 200
            await until(lambda: not left(), WAIT_S)
        finally:
            gc.enable()
