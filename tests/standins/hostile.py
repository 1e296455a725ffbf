# SPDX-License-Identifier: Apache-2.0
"""Servers behind a proxy that answer as no server should, as a process of its own.

`python -m tests.standins.hostile 127.0.0.1:36367` registers one server for each way to misbehave and dialect,
each with a model of its own name (`model_of`). All answer whole requests alone (role `both`).
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import zmq
import zmq.asyncio

from kvferry.proxy.wire import registration as wire

DIALECTS = ("native", "vllm-nixl")
OK = b"HTTP/1.1 200 OK\r\n"
PAD = b"a" * 2**16
EVENT = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":"a"}]}\n\n'
WHOLE = {
    "id": "x",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def whole(body: bytes, *fields: bytes, status: bytes = b"200 OK") -> Iterator[bytes]:
    """A response with a length."""
    head = b"".join(field + b"\r\n" for field in (b"Content-Length: %d" % len(body), *fields))
    yield b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\n" + head + b"\r\n" + body


def stream(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """A chunked stream of events."""
    yield OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    for piece in pieces:
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def error(message: str, status: bytes, *fields: bytes) -> Iterator[bytes]:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "hostile"}}
    return whole(json.dumps(body).encode(), *fields, status=status)


def answer() -> bytes:
    return json.dumps(WHOLE).encode()


WAYS: dict[str, Callable[[], Iterator[bytes]]] = {
    "a header without an end": lambda: itertools.chain([OK + b"X-Pad: "], itertools.repeat(PAD)),
    "a header of 32 MB": lambda: whole(answer(), b"X-Pad: " + b"a" * 2**25),
    "headers without an end": lambda: itertools.chain([OK], itertools.repeat(b"X-Pad: a\r\n" * 1000)),
    "1xx without an end": lambda: itertools.repeat(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000),
    "status 099": lambda: whole(answer(), status=b"099 OK"),
    "an empty 200": lambda: whole(b""),
    "a binary 200": lambda: whole(bytes(range(256)) * 10),
    "a gzip 200": lambda: whole(gzip.compress(answer()), b"Content-Encoding: gzip"),
    "an answer without an end": lambda: itertools.chain(
        [OK + b"Content-Type: application/json\r\n\r\n"], itertools.repeat(b" " * 2**16)
    ),
    "a Retry-After of any bytes": lambda: error(
        "busy", b"503 No", b"Retry-After: " + b"\x80\xff<b>" * 10_000
    ),
    "an error of 1 MB": lambda: error("a" * 2**20, b"400 No"),
    "a Server-Timing of 60 KB": lambda: whole(
        answer(), b"Server-Timing: " + b"a;dur=1, " * 6_600 + b"b;dur=1"
    ),
    "events without an end": lambda: stream(itertools.repeat(EVENT * 500)),
    "an event without an end": lambda: stream(itertools.chain([b"data: {"], itertools.repeat(PAD))),
    "token lines without an end": lambda: stream(itertools.repeat(b": t 0 7\n" * 5000)),
    "a token line without an end": lambda: stream(
        itertools.chain([b": t 0 7"], itertools.repeat(b",7" * 20_000))
    ),
    "comments without an end": lambda: stream(itertools.repeat(b": a\n\n" * 5000)),
    "[DONE] alone": lambda: stream(iter([b"data: [DONE]\n\n"])),
    "no event at all": lambda: stream(iter([])),
}


def model_of(way: str, dialect: str) -> str:
    """The model under which a server is registered."""
    return f"hostile/{dialect}/{way}"


async def serve(way: str) -> int:
    """Serve in one way; returns the port."""

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for _ in _requests(reader):
                for piece in WAYS[way]():
                    writer.write(piece)
                    await writer.drain()
                if b"without" in way.encode():
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each request's body."""
    while True:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            yield await reader.readexactly(int(fields.get(b"content-length", b"0")))
        except asyncio.IncompleteReadError:
            return


def registration(model: str, dialect: str, port: int, index: int, incarnation: str) -> wire.Register:
    fields: dict[str, Any] = dict.fromkeys(("layout", "weights", "tokenizer"), "hostile")
    return wire.Register(
        role="both",
        incarnation=wire.Incarnation(incarnation),
        index=index,
        address=f"http://127.0.0.1:{port}",
        control=f"tcp://127.0.0.1:{port}",
        dialect=dialect,
        model=model,
        max_model_len=4096,
        tp_size=1,
        dp_size=1,
        transfers=("tcp",) if dialect == "native" else (),
        host_id="hostile",
        transfer_mode="read",
        version="0",
        state="ready",
        steps=index,
        load=wire.Load(running=0, waiting=0, kv_blocks_free=64, kv_blocks_total=64, kv_blocks_leased=0),
        **fields,
    )


async def main(proxy: str) -> None:
    servers = [
        (model_of(way, dialect), dialect, await serve(way), secrets.token_hex(8))
        for way in WAYS
        for dialect in DIALECTS
    ]
    context = zmq.asyncio.Context()
    dealers = [context.socket(zmq.DEALER) for _ in servers]
    for dealer in dealers:
        dealer.connect(f"tcp://{proxy}")
    print(json.dumps({"listening": {"url": "http://127.0.0.1"}}), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    for index in itertools.count(1):
        for dealer, (model, dialect, port, incarnation) in zip(dealers, servers, strict=True):
            await dealer.send(wire.encode(registration(model, dialect, port, index, incarnation)))
        try:
            await asyncio.wait_for(stop.wait(), wire.PING_INTERVAL_S)
        except TimeoutError:
            continue
        break
    context.destroy(linger=0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
