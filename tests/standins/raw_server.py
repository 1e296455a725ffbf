# SPDX-License-Identifier: Apache-2.0
"""A stand-in server that breaks HTTP, or its engine's protocol, as it is told: it answers with given bytes.

`python -m tests.standins.raw_server --kind header` runs one as a process of its own, which prints its URL.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress

PIECE = 64 * 1024
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"x","created":1,"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'


class RawServer:
    """Serves on a port of its own while open.

    `script` is what it sends, piece by piece, once it has a request's head and body; then it closes the
    connection.
    """

    def __init__(self, *script: bytes) -> None:
        self.script: Iterable[bytes] = script
        self.sent = 0
        """Bytes, as far as the kernel has taken them."""
        self.url = ""
        self._server: asyncio.Server

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def serve_forever(self) -> None:
        await self._server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0].strip()
            await reader.readexactly(int(length or 0))
            for piece in self.script:
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
        writer.close()


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK", trailer: bytes | None = None) -> bytes:
    """A response that is not streamed; in chunks if it has a trailer."""
    lines = [b"HTTP/1.1 " + status, b"Content-Type: application/json", *headers]
    if trailer is None:
        return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])
    return b"\r\n".join(
        [*lines, b"Transfer-Encoding: chunked", b"", b"%x" % len(body), body, b"0", trailer, b"", b""]
    )


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def stream(*payloads: bytes) -> bytes:
    """A stream of events, to its end."""
    return STREAM_HEAD + b"".join(map(chunk, payloads)) + b"0\r\n\r\n"


class Flood:
    """What never ends, of each kind; anew for every request."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __iter__(self) -> Iterator[bytes]:
        match self._kind:
            case "header":
                yield b"HTTP/1.1 200 OK\r\nX-Long: "
                piece = b"x" * PIECE
            case "headers":
                yield b"HTTP/1.1 200 OK\r\n"
                piece = b"X-One-More: of many\r\n" * 3000
            case "interim":
                piece = b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n" * 2000
            case "extension":
                yield STREAM_HEAD + b"5;"
                piece = b"x" * PIECE
            case "trailer":
                yield STREAM_HEAD + chunk(EVENT) + b"0\r\nX-Long: "
                piece = b"x" * PIECE
            case "event":
                yield STREAM_HEAD
                piece = chunk(b"data: " + b"x" * PIECE)
            case "events":
                yield STREAM_HEAD
                piece = chunk(EVENT * 600)
            case "token-lines":
                yield STREAM_HEAD
                piece = chunk(b": t 0 1,2,3,4\n\n" * 4000)
            case unknown:
                raise ValueError(unknown)
        yield from itertools.repeat(piece)


FLOODS = ("header", "headers", "interim", "extension", "trailer", "event", "events", "token-lines")


async def _main(kind: str) -> None:
    async with RawServer() as server:
        server.script = Flood(kind)
        print(json.dumps({"listening": {"url": server.url}}), flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server that sends without end.")
    parser.add_argument("--kind", choices=FLOODS, required=True)
    asyncio.run(_main(parser.parse_args().kind))
