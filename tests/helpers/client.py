# SPDX-License-Identifier: Apache-2.0
"""A client that reduces streamed and plain answers to the same comparable value."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.helpers.waiting import patient

DATA = Path(__file__).parents[1] / "data"
REQUEST_TIMEOUT_S = patient(120.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One held-out prompt and the answer that the bundled model was taught."""

    id: str
    task: str
    prompt: str
    answer: str
    prompt_tokens: int
    asked_pair_token: int | None


@dataclass(slots=True)
class Choice:
    """One choice, as I4 compares it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """One whole answer; `timing` is what the decode agent (or the only agent) reports about it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    timing: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    gaps: list[float] = field(default_factory=list)
    """Seconds between the events of a stream; the first one's since the request."""

    def same(self) -> tuple[object, ...]:
        """What must be equal bit for bit: everything but timing and cached-token counts."""
        choices = tuple(
            (index, choice.text, tuple(choice.token_ids), tuple(choice.logprobs), choice.finish_reason)
            for index, choice in sorted(self.choices.items())
        )
        return choices, self.prompt_tokens, self.completion_tokens


class RequestFailed(RuntimeError):
    """The server answered with an error; `status` is the HTTP status, or None inside a stream."""

    def __init__(self, status: int | None, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status = status
        self.error = error


class StreamCut(RuntimeError):
    """A stream ended without `[DONE]`, be it after an error event: never allowed."""


def heldout(count: int | None = None, task: str | None = None) -> list[Prompt]:
    """The held-out prompts; with `count`, an even selection of that many."""
    lines = (DATA / "heldout.jsonl").read_text().splitlines()
    prompts = [Prompt(**json.loads(line)) for line in lines]
    if task is not None:
        prompts = [prompt for prompt in prompts if prompt.task == task]
    if count is None:
        return prompts
    return [prompts[index * len(prompts) // count] for index in range(count)]


def mixed_bodies(count: int, stream_tokens: int) -> list[dict[str, Any]]:
    """Streams of so many tokens in turn with plain requests, some of them with several choices."""
    return [
        {
            "model": "ferry-tiny",
            "prompt": prompt.prompt,
            "seed": index,
            "max_tokens": stream_tokens if index % 2 else 16,
            "ignore_eos": True,
            "stream": bool(index % 2),
            "n": 3 if index % 5 == 0 else 1,
        }
        for index, prompt in enumerate(heldout(count))
    ]


def session(trust: ssl.SSLContext | None = None, *, keep_alive: bool = True) -> aiohttp.ClientSession:
    """`trust`: how certificates are checked. `keep_alive`: whether a connection has more than one request."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, ssl=trust or True, force_close=not keep_alive),
    )


async def complete(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """POST one completion, streamed if the body says so. Raises `RequestFailed` or `StreamCut`."""
    asked = {"return_token_ids": True, "kvferry_timing": True, **body}
    if asked.get("stream"):
        asked["stream_options"] = {"include_usage": True}
    answer, last = Answer(), time.monotonic()
    async with http.post(f"{url}/v1/completions", json=asked) as response:
        if response.status != 200:
            raise RequestFailed(response.status, (await response.json())["error"])
        if not asked.get("stream"):
            _add(answer, await response.json())
            return answer
        assert response.content_type == "text/event-stream"
        failure: RequestFailed | None = None
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                if failure is not None:
                    raise failure
                return answer
            assert failure is None, "an event after the error event"
            event = json.loads(data)
            if "error" in event:
                failure = RequestFailed(None, event["error"])
                continue
            answer.events += 1
            answer.gaps.append((now := time.monotonic()) - last)
            last = now
            _add(answer, event)
    raise StreamCut(f"after {answer.events} events")


async def complete_all(
    url: str,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    trust: ssl.SSLContext | None = None,
) -> list[Answer | RequestFailed | StreamCut]:
    """Send every body, at most `concurrency` at once; answers in the order of the bodies."""
    gate = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> Answer | RequestFailed | StreamCut:
        async with gate:
            try:
                return await complete(http, url, body)
            except (RequestFailed, StreamCut) as error:
                return error

    async with session(trust) as http:
        return list(await asyncio.gather(*(one(body) for body in bodies)))


def _add(answer: Answer, event: dict[str, Any]) -> None:
    for part in event["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        choice.text += part["text"]
        choice.token_ids += part.get("token_ids") or []
        choice.margins += part.get("margins") or []
        if part.get("logprobs"):
            choice.logprobs += part["logprobs"]["token_logprobs"]
        if part["finish_reason"] is not None:
            assert choice.finish_reason is None, "two finish reasons for one choice"
            choice.finish_reason = part["finish_reason"]
    if event.get("usage"):
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
        answer.completion_tokens = event["usage"]["completion_tokens"]
    if event.get("kvferry_timing"):
        answer.timing = event["kvferry_timing"]
