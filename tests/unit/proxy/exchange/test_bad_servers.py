# SPDX-License-Identifier: Apache-2.0
"""What a server behind the proxy may send: bounded, checked, and never passed on as an answer that is none.

Each through a whole proxy, from a server over real sockets that sends just these bytes.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest

from kvferry.proxy import sse
from kvferry.proxy.dialects.sent_tokens import MAX_LINES_BYTES
from kvferry.proxy.errors import MAX_AGENT_MESSAGE_CHARS
from kvferry.proxy.http.upstream_connection import MAX_HEAD_BYTES
from tests.helpers.waiting import patient, until
from tests.standins.agents import StandInAgent
from tests.standins.raw_server import EVENT, STREAM_HEAD, Flood, RawServer, chunk, stream, whole
from tests.unit.proxy.conftest import Stage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}
PROMPT_S = 15.0
"""Within which a bad server must have been noticed; every deadline of the proxy for a response is longer."""
SOCKET_BUFFERS = 32 * 2**20
"""What a kernel may take from a server that the proxy has stopped reading from."""

Serve = Callable[..., Awaitable[RawServer]]


@pytest.fixture
async def serve(stage: Stage) -> AsyncIterator[Serve]:
    """`serve(*script, dialect=…)`: an agent for all roles, whose HTTP server sends the script."""
    async with AsyncExitStack() as stack:

        async def start(*script: bytes, dialect: str = "native") -> RawServer:
            server = await stack.enter_async_context(RawServer(*script))
            await stage.bring(
                StandInAgent(
                    "both", (stage.discovery,), overrides={"address": server.url, "dialect": dialect}
                )
            )
            return server

        yield start


def answer(**members: Any) -> bytes:
    choice = {"index": 0, "text": "x", "finish_reason": "stop"}
    return json.dumps({"id": "theirs", "created": 1, "choices": [choice], **members}).encode()


NOT_UTF_8 = answer(of_the_engine="\u00e9").replace(b"\\u00e9", b"\xe9")
BAD_BODIES = {
    "empty": whole(b""),
    "binary": whole(bytes(range(256))),
    "gzip": whole(gzip.compress(answer()), b"Content-Encoding: gzip"),
    "gzip in name only": whole(answer(), b"Content-Encoding: gzip"),
    "no object": whole(b"[]"),
    "no choices": whole(b"{}"),
    "too few choices": whole(answer(choices=[])),
    "no end": whole(answer(choices=[{"index": 0, "text": "x", "finish_reason": None}])),
    "not UTF-8": whole(NOT_UTF_8),
    "no content": whole(b"", status=b"204 No Content"),
}


@pytest.mark.parametrize("dialect", ["native", "vllm-nixl"])
@pytest.mark.parametrize("kind", BAD_BODIES)
async def test_a_body_that_is_no_answer_is_a_bad_answer(
    stage: Stage, serve: Serve, kind: str, dialect: str
) -> None:
    """D10, I5: never HTTP 200 with nothing in it."""
    await serve(BAD_BODIES[kind], dialect=dialect)
    async with asyncio.timeout(PROMPT_S):
        status, body = await stage.ask(BODY)
    assert (status, body["error"]["code"]) == (502, "bad_agent_answer")
    assert len(json.dumps(body)) < MAX_AGENT_MESSAGE_CHARS + 500


BAD_STREAMS = {
    "[DONE] alone": stream(sse.DONE),
    "[DONE] too early": stream(b": t 0 5\n" + EVENT, sse.DONE),
    "gzip": stream(sse.DONE).replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1),
}


@pytest.mark.parametrize("dialect", ["native", "vllm-nixl"])
@pytest.mark.parametrize("kind", BAD_STREAMS)
async def test_a_stream_that_is_no_answer_is_an_error(
    stage: Stage, serve: Serve, kind: str, dialect: str
) -> None:
    """D10: what was sent of it stays; it ends with a typed error, not with `[DONE]` alone."""
    raw = BAD_STREAMS[kind]
    await serve(raw if dialect == "native" else raw.replace(b": t 0 5\n", b""), dialect=dialect)
    async with asyncio.timeout(PROMPT_S), stage.post({**BODY, "stream": True}) as response:
        text = await response.text()
    if response.status == 200:
        assert kind == "[DONE] too early"
        text = text.removesuffix(sse.DONE.decode()).rpartition("data: ")[2]
    assert json.loads(text)["error"]["type"] == "server_error"


async def test_what_is_said_of_a_refusal_is_checked_and_shortened(stage: Stage, serve: Serve) -> None:
    """A megabyte of an engine's words, and bytes of its choice in `Retry-After`."""
    error = {
        "message": "no " * 300_000,
        "type": "T" * 5000,
        "param": {"deep": "er"},
        "code": 7,
        "more": "x" * 9999,
    }
    raw = json.dumps({"error": error}).encode()
    server = await serve()
    for retry_after, shown in ((b"7", "7"), (b"99999", "3600"), (b"7;<script>\xff", None), (b"-1", None)):
        server.script = [whole(raw, b"Retry-After: " + retry_after, status=b"429 Busy")]
        async with stage.post(BODY) as response:
            assert (response.status, response.headers.get("Retry-After")) == (429, shown)
            told = (await response.json())["error"]
            assert told.keys() == {"message", "type", "param", "code"} and told["code"] == 7
            assert told["message"].startswith("no no") and told["param"] is None
            assert all(len(str(value)) <= MAX_AGENT_MESSAGE_CHARS for value in told.values())


async def test_a_refusal_in_sglangs_shape_is_passed_on(stage: Stage, serve: Serve) -> None:
    """Its error is the whole body."""
    error = {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    await serve(whole(json.dumps(error).encode(), status=b"400 Bad Request"))
    status, body = await stage.ask(BODY)
    assert (status, body["error"]["message"], body["error"]["code"]) == (400, "too long", 400)


async def test_an_agents_failure_is_told_in_short(stage: Stage, serve: Serve) -> None:
    raw = json.dumps({"error": {"message": "boom " * 100_000}}).encode()
    await serve(whole(raw, status=b"500 Oops"))
    status, body = await stage.ask(BODY)
    assert status >= 500 and len(json.dumps(body)) < MAX_AGENT_MESSAGE_CHARS + 500


async def test_of_an_agents_timing_only_names_and_durations_are_passed_on(stage: Stage, serve: Serve) -> None:
    """50 KB of it broke clients, whose own limit for a header is 8 KB."""
    many = b", ".join(b"queue;dur=%d.5" % number for number in range(3000))
    server = await serve(whole(answer(), b"Server-Timing: " + many))
    async with stage.post(BODY) as response:
        assert len(response.headers["Server-Timing"]) < 1000
        assert "decode.queue;dur=0.5" in response.headers["Server-Timing"]
    for bad in (
        b'queue;desc="<b>"',
        b"\xff;dur=1",
        b"a" * 5000 + b";dur=1",
        b"queue;dur=1e9",
        b"queue;dur=1;x=y",
    ):
        server.script = [whole(answer(), b"Server-Timing: " + bad)]
        async with stage.post(BODY) as response:
            assert response.status == 200
            assert "decode." not in response.headers["Server-Timing"]


async def test_a_trailer_is_no_header(stage: Stage, serve: Serve) -> None:
    await serve(whole(answer(), trailer=b"Server-Timing: late;dur=9"))
    async with stage.post(BODY) as response:
        assert response.status == 200
        assert "late" not in response.headers["Server-Timing"]


async def test_a_head_up_to_the_limit_is_read(stage: Stage, serve: Serve) -> None:
    padding = [b"X-%d: " % number + b"x" * 1000 for number in range(MAX_HEAD_BYTES // 1100)]
    await serve(whole(answer(), *padding))
    assert (await stage.ask(BODY))[0] == 200


BAD_HEADS = {
    "large": whole(answer(), b"X-Long: " + b"x" * MAX_HEAD_BYTES),
    "many": whole(answer(), *[b"X-One-More: of many"] * (MAX_HEAD_BYTES // 20)),
    "status 099": whole(answer(), status=b"099 What"),
    "status 007": whole(answer(), status=b"007 Bond"),
}


@pytest.mark.parametrize("kind", BAD_HEADS)
async def test_a_bad_head_loses_the_agent(stage: Stage, serve: Serve, kind: str) -> None:
    """D11: there was no bound; 099 was taken for an interim response and waited out."""
    await serve(BAD_HEADS[kind])
    async with asyncio.timeout(PROMPT_S):
        status, body = await stage.ask(BODY)
    assert status in (502, 503) and body["error"]["type"] == "server_error"


@pytest.mark.parametrize("dialect", ["native", "vllm-nixl"])
@pytest.mark.parametrize("kind", ["header", "headers", "interim", "extension", "trailer", "event"])
async def test_what_never_ends_is_cut_off(stage: Stage, serve: Serve, kind: str, dialect: str) -> None:
    """D11: bytes without end where a client gets nothing of them. Deadlines alone would take minutes."""
    server = await serve(dialect=dialect)
    server.script = Flood(kind)
    async with asyncio.timeout(PROMPT_S), stage.post({**BODY, "stream": True}) as response:
        text = await response.text()
    assert '"server_error"' in text
    most = sse.MAX_EVENT_BYTES if kind == "event" else 4 * MAX_HEAD_BYTES
    assert server.sent < most + SOCKET_BUFFERS


async def test_token_lines_without_end_are_cut_off(stage: Stage, serve: Serve) -> None:
    """Each is a whole event, of which the client gets nothing and the proxy keeps all."""
    line = b": t 0 " + b"1," * 2**19 + b"1\n\n"
    server = await serve(STREAM_HEAD, *[chunk(line)] * 64)
    async with asyncio.timeout(2 * PROMPT_S), stage.post({**BODY, "stream": True}) as response:
        assert "token lines exceed" in await response.text()
    assert server.sent < MAX_LINES_BYTES + SOCKET_BUFFERS


LARGE = 8 * 2**20
REFUSED: dict[str, tuple[bool, Any]] = {
    "an event": (True, Flood("event")),
    "a stream that is cut": (True, [STREAM_HEAD, chunk(b"data: " + b"x" * LARGE)]),
    "a body": (False, [whole(answer(choices=[], pad="x" * LARGE))]),
    "a body that is cut": (False, [whole(answer(pad="x" * LARGE))[:-1]]),
}


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection; what Python allocates is counted."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("dialect", ["native", "vllm-nixl"])
@pytest.mark.parametrize("kind", REFUSED)
async def test_nothing_stays_of_what_was_refused(stage: Stage, serve: Serve, kind: str, dialect: str) -> None:
    """Exceptions and the frames that they left kept it until a full garbage collection: 298 MiB in 2 s."""
    is_stream, script = REFUSED[kind]
    server = await serve(dialect=dialect)
    server.script = script
    with uncollected():
        for _ in range(2):
            async with stage.post({**BODY, "stream": is_stream}) as response:
                assert '"server_error"' in await response.text()
        # The thread that read it may still be returning.
        await until(lambda: tracemalloc.get_traced_memory()[0] < LARGE // 2, patient(5.0))
