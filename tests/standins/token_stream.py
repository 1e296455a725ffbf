# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a server of OpenAI's API, for its clients: it streams as many words as tokens are asked for.

What a prompt says, makes it misbehave: see `Misbehaviour`. A prompt of n words has 3 n + 5 tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

from aiohttp import web

MODEL = "stand-in"


class Misbehaviour(StrEnum):
    REFUSES = "refuses"
    ERROR_IN_STREAM = "error in the stream"
    NO_DONE = "no end"
    NO_TEXT = "no text"
    HANGS = "hangs"
    NO_JSON = "no JSON"
    CLOSES = "closes"
    KEEPS_OPEN = "keeps open"


class TokenStream:
    """`bodies` are those of all requests, `most_at_once` how many of them it had at a time."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.most_at_once = 0
        self._now = 0
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        length = 3 * len(prompt.split()) + 5 if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"]}
        if prompt == Misbehaviour.REFUSES:
            return web.json_response({"error": {"message": "too\nlong"}}, status=400)
        if not body["stream"]:
            return web.json_response({"choices": [{"text": "word"}], "usage": usage})
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return await self._stream(request, prompt, body, usage)
        finally:
            self._now -= 1

    async def _stream(
        self, request: web.Request, prompt: str | list[int], body: dict[str, Any], usage: dict[str, int]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        words = "" if prompt == Misbehaviour.NO_TEXT else "word"
        if "messages" in body:
            await _event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"]):
            choice = {"delta": {"content": words}} if "messages" in body else {"text": words}
            await _event(response, {"choices": [choice]})
            await asyncio.sleep(0)
        match prompt:
            case Misbehaviour.HANGS:
                await asyncio.Event().wait()
            case Misbehaviour.ERROR_IN_STREAM:
                await _event(response, {"error": {"message": "agent lost"}})
            case Misbehaviour.NO_JSON:
                await response.write(b"data: {\n\n")
            case Misbehaviour.CLOSES:
                assert request.transport is not None
                request.transport.abort()
                return response
        await _event(response, {"choices": [], "usage": usage})
        if prompt != Misbehaviour.NO_DONE:
            await response.write(b"data: [DONE]\n\n")
        if prompt == Misbehaviour.KEEPS_OPEN:
            await asyncio.Event().wait()
        return response


async def _event(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(data)}\n\n".encode())


@asynccontextmanager
async def token_stream() -> AsyncIterator[TokenStream]:
    """Run the server at a port of this host."""
    server = TokenStream()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = site.name.replace(":0", f":{runner.addresses[0][1]}")
        yield server
    finally:
        await runner.cleanup()
