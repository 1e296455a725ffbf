# SPDX-License-Identifier: Apache-2.0
"""HTTP as no client library would send it."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

REPLY_S = 60.0
MAX_KEPT = 2**18
"""Of a chunked body: its end."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One response: its head as it came, and what followed up to its end or the connection's."""

    status: int
    head: bytes
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error of a body in OpenAI's format."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return dict(error)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server, aborted at the end."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(url: str, sent: bytes, reply_s: float = REPLY_S) -> Reply | None:
    """Send these bytes and return the first response, or None if the connection is closed without one."""
    async with asyncio.timeout(reply_s), connected(url) as (reader, writer):
        with suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
        return await read_reply(reader)


async def read_reply(reader: asyncio.StreamReader) -> Reply | None:
    """Return the next response, or None if the connection is closed before its head is complete."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    body = b""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        if b"content-length" in fields:
            body = await reader.readexactly(int(fields[b"content-length"]))
        elif fields.get(b"transfer-encoding") == b"chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body = (body + (await reader.readexactly(size + 2))[:-2])[-MAX_KEPT:]
    return Reply(int(head.split(b" ", 2)[1]), head, body)


async def post(url: str, raw: bytes, path: str = "/v1/completions") -> Reply:
    """POST a body as it is."""
    timeout = aiohttp.ClientTimeout(total=120)
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(timeout=timeout, max_field_size=2**20) as http,
        http.post(f"{url}{path}", data=io.BytesIO(raw), headers=headers) as response,
    ):
        head = b"\r\n".join(name + b": " + value for name, value in response.raw_headers)
        return Reply(response.status, head, await response.read())


async def flood(url: str, first: bytes, more: bytes, seconds: float, *, read: bool = False) -> None:
    """Send without an end, over a new connection whenever one is closed; `read` what comes, or never."""

    async def drop_all(reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while await reader.read(2**18):
                pass

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        async with connected(url) as (reader, writer):
            reading = asyncio.ensure_future(drop_all(reader)) if read else None
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(end - time.monotonic()):
                    writer.write(first)
                    while True:
                        await writer.drain()
                        writer.write(more)
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
