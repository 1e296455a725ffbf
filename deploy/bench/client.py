# SPDX-License-Identifier: Apache-2.0
"""One streamed request to a server of OpenAI's API, and what its client sees of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec

from kvferry.common.exceptions import NOT_JSON
from kvferry.common.http.tls import client_context
from kvferry.common.options import read_key
from kvferry.deploy.bench.config import BenchConfig, Target
from kvferry.deploy.bench.workload import PlannedRequest
from kvferry.deploy.http_client import describe_page, read_page, refusal, why_no_response
from kvferry.proxy import sse
from kvferry.proxy.errors import BadResponse

MAX_PAGE_BYTES = 1 << 20
MAX_REASON_CHARS = 200
BODY_END_S = 0.2
"""For the end of a stream's body after `[DONE]`."""
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class BenchFailed(RuntimeError):
    """A server cannot be measured; the message names it and says why."""


class Observation(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times are seconds, from its sending unless named otherwise.

    `failure` is empty if the answer came whole; then there is at least one event. `request_id` was sent as
    `X-Request-Id`.
    """

    request_id: str = ""
    due_s: float
    sent_s: float
    """When it was to be sent, and when it was: from the start of the round."""
    events_s: list[float] = msgspec.field(default_factory=list)
    """Of each event that carried text, reasoning or a call, or of each with a choice if that is wanted."""
    end_s: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        return self.events_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if the answer has one token."""
        tokens = len(self.events_s) if self.output_tokens is None else self.output_tokens
        return None if tokens < 2 else (self.events_s[-1] - self.events_s[0]) / (tokens - 1)


class BenchClient:
    """A client of one server. Made by `connected_client`."""

    def __init__(
        self, http: aiohttp.ClientSession, target: Target, config: BenchConfig, *, count_empty: bool
    ) -> None:
        self._http = http
        self._config = config
        self._count_empty = count_empty
        self._url = target.url + PATHS[config.api]
        self.target = target
        self.model = config.model or ""

    async def find_model(self) -> None:
        """Take the first model that the server lists, unless one is given. Raises `BenchFailed`."""
        if self.model:
            return
        page = await self._page("GET", f"{self.target.url}/v1/models", None)
        try:
            models = msgspec.json.decode(page, type=_Models).data
        except NOT_JSON as error:
            raise BenchFailed(
                f"{self.target.url} lists no models as OpenAI does, it answered with {describe_page(page)}"
            ) from error
        if not models:
            raise BenchFailed(f"{self.target.url} serves no model yet")
        self.model = models[0].id

    async def count_tokens(self, prompt: str) -> int:
        """Return the prompt tokens that the server reports for a text. Raises `BenchFailed`."""
        body = self._body(PlannedRequest(0.0, prompt, 1)) | {"stream": False}
        del body["stream_options"]
        page = await self._page("POST", self._url, body)
        try:
            usage = msgspec.json.decode(page, type=_Whole).usage
        except NOT_JSON as error:
            raise BenchFailed(f"{self.target.url}: an answer cannot be read: {error}") from error
        if usage is None:
            raise BenchFailed(f"{self.target.url}: its answers have no usage, by which prompts are measured")
        return usage.prompt_tokens

    async def send(self, request: PlannedRequest, start: float) -> Observation:
        """Send one request and read its answer, up to `[DONE]`. A failure is in the observation, not raised.

        `start` is when the round started, by `perf_counter`.
        """
        sent = time.perf_counter()
        seen = Observation(request_id=secrets.token_hex(8), due_s=request.due_s, sent_s=sent - start)
        headers = {"X-Request-Id": seen.request_id}
        try:
            async with self._http.post(self._url, json=self._body(request), headers=headers) as response:
                if response.status != 200:
                    page = await read_page(response, BenchFailed, MAX_PAGE_BYTES)
                    seen.failure = f"HTTP {response.status}: {_message(page)}"
                else:
                    await self._read_stream(response, seen, sent)
        except TimeoutError:
            seen.failure = f"no end within {self._config.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            seen.failure = why_no_response(error)
        except (BadResponse, BenchFailed, *NOT_JSON) as error:
            seen.failure = f"the answer cannot be read: {error}"[:MAX_REASON_CHARS]
        seen.end_s = seen.end_s or round(time.perf_counter() - sent, 6)
        return seen

    async def _read_stream(self, response: aiohttp.ClientResponse, seen: Observation, sent: float) -> None:
        """Note the events of a streamed answer. Raises `BadResponse` and what `NOT_JSON` names."""
        scanner = sse.Scanner()
        while not scanner.done and (part := await response.content.readany()):
            now = round(time.perf_counter() - sent, 6)
            for event in sse.split(scanner.feed(part)):
                data = sse.data(event)
                if data is not None and data != b"[DONE]":
                    self._note(msgspec.json.decode(data, type=_Chunk), seen, now)
        if scanner.done:
            seen.end_s = round(time.perf_counter() - sent, 6)
            # The connection can serve the next request if its body ends now.
            with suppress(TimeoutError, aiohttp.ClientError, OSError):
                async with asyncio.timeout(BODY_END_S):
                    while await response.content.readany():
                        pass
        elif not seen.failure:
            seen.failure = "the stream ended without [DONE]"
        if not seen.failure and not seen.events_s:
            seen.failure = "the answer has no text"

    def _note(self, chunk: _Chunk, seen: Observation, now: float) -> None:
        if chunk.error is not None:
            seen.failure = f"error in the stream: {chunk.error.message}"[:MAX_REASON_CHARS]
        if any(self._count_empty or choice.text or choice.delta.has_text for choice in chunk.choices):
            seen.events_s.append(now)
        if chunk.usage is not None:
            seen.prompt_tokens = chunk.usage.prompt_tokens
            seen.output_tokens = chunk.usage.completion_tokens

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.ignore_eos:
            body["ignore_eos"] = True
        if self._config.api == "chat":
            return body | {"messages": [{"role": "user", "content": request.prompt}]}
        return body | {"prompt": request.prompt}

    async def _page(self, method: str, url: str, body: dict[str, Any] | None) -> bytes:
        """Return the body of a 200 response. Raises `BenchFailed`."""
        try:
            async with self._http.request(method, url, json=body) as response:
                page = await read_page(response, BenchFailed, MAX_PAGE_BYTES)
        except TimeoutError as error:
            raise BenchFailed(f"{url}: no response within {self._config.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BenchFailed(f"{url} cannot be reached: {why_no_response(error)}") from error
        if response.status != 200:
            raise BenchFailed(refusal(url, response.status, page, server="a server of OpenAI's API"))
        return page


@asynccontextmanager
async def connected_client(
    target: Target, config: BenchConfig, *, count_empty: bool = False
) -> AsyncIterator[BenchClient]:
    """A client that knows the model to request. Raises `BenchFailed`, OSError and `BadCertificate`.

    Args:
        count_empty: Whether an event without text counts: of random tokens many are no whole character.
    """
    headers = {} if config.key is None else {"Authorization": f"Bearer {read_key(config.key)}"}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if config.ca is None else client_context(config.ca), limit=0),
        timeout=aiohttp.ClientTimeout(total=config.timeout_s),
        headers=headers,
        trust_env=False,
    ) as http:
        client = BenchClient(http, target, config, count_empty=count_empty)
        await client.find_model()
        yield client


def _message(page: bytes) -> str:
    try:
        message = msgspec.json.decode(page, type=_Refusal).error.message
    except NOT_JSON:
        message = page.decode(errors="replace")
    return " ".join(message.split())[:MAX_REASON_CHARS]


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


class _ChunkUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChunkDelta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[msgspec.Raw, ...] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _ChunkChoice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _ChunkDelta = _ChunkDelta()


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_ChunkChoice, ...] = ()
    usage: _ChunkUsage | None = None
    error: _Error | None = None


class _Whole(msgspec.Struct, frozen=True):
    usage: _ChunkUsage | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...] = ()
