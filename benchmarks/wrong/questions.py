# SPDX-License-Identifier: Apache-2.0
"""What is asked, and what becomes of it, beside the answers of one plain server."""

from __future__ import annotations

import asyncio
import enum
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from tests.chaos.judge import TIE
from tests.system.vllm.servers import MODEL

DISTINCT = 1000
PAIRS = (9, 21)
"""Of a letter pair and digits; about 6.5 tokens each, so prompts have 60 to 145 tokens."""
MAX_TOKENS = 8
HUNG_S = 60.0


class Outcome(enum.StrEnum):
    RIGHT = "right"
    TIE = "tie"
    """Differs from the plain server's answer, at first where that one was as near to another token."""
    WRONG = "wrong"
    """Another answer, with HTTP 200."""
    ERROR = "error"
    """An HTTP status of 400 or more with a JSON `error`, or an event with one."""
    UNTYPED = "untyped"
    """An error without a JSON `error`, a closed connection, or a stream without its end."""
    HUNG = "hung"


class Reference(NamedTuple):
    """The answer of a plain server; margins are in nats, by token."""

    text: str
    tokens: list[str]
    margins: list[float]

    def judge(self, text: str) -> Outcome:
        if text == self.text:
            return Outcome.RIGHT
        so_far = ""
        for token, margin in zip(self.tokens, self.margins, strict=True):
            so_far += token
            if not text.startswith(so_far):
                return Outcome.TIE if margin <= TIE else Outcome.WRONG
        return Outcome.WRONG


class Result(NamedTuple):
    """One request. `detail`: the wrong answer, or the error."""

    question: int
    outcome: Outcome
    seconds: float
    detail: str = ""


def questions() -> list[str]:
    """Prompts of the task that the bundled model was taught, `DISTINCT` of them, four about each list.

    Neighbours are about different lists.
    """
    rng = random.Random(38)
    lists = []
    for _ in range(DISTINCT // 4):
        names = {"".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=2)) for _ in range(rng.randint(*PAIRS))}
        lists.append({name: f"{rng.randrange(10_000):04}" for name in sorted(names)})
    texts = ["".join(f"{name}={value};" for name, value in each.items()) for each in lists]
    asked = [rng.sample(sorted(each), 4) for each in lists]
    return [f"{text}?{names[turn]}=" for turn in range(4) for text, names in zip(texts, asked, strict=True)]


async def ask_plain(url: str, prompts: Sequence[str], concurrency: int = 16) -> list[Reference]:
    """Raises AssertionError if an answer is an error."""
    gate = asyncio.Semaphore(concurrency)

    async def one(http: aiohttp.ClientSession, prompt: str) -> Reference:
        async with gate, http.post(f"{url}/v1/completions", json=_body(prompt) | {"logprobs": 2}) as response:
            assert response.status == 200, await response.text()
            [choice] = (await response.json())["choices"]
        told = choice["logprobs"]
        nearest = [sorted(top.values(), reverse=True)[:2] for top in told["top_logprobs"]]
        return Reference(choice["text"], told["tokens"], [one - other for one, other in nearest])

    async with aiohttp.ClientSession() as http:
        return await asyncio.gather(*(one(http, prompt) for prompt in prompts))


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one system; half of the questions as streams."""

    url: str
    http: aiohttp.ClientSession
    prompts: Sequence[str]
    references: Sequence[Reference]

    async def ask(self, number: int, salt: str = "") -> Result:
        """A question, by its number, to its end or for `HUNG_S`."""
        began, outcome, detail = time.monotonic(), Outcome.UNTYPED, ""
        body = _body(self.prompts[number]) | ({"cache_salt": salt} if salt else {})
        try:
            async with asyncio.timeout(HUNG_S):
                text, error = await self._post(body | {"stream": bool(number % 2)})
            outcome, detail = (Outcome.ERROR, error) if error else (self.references[number].judge(text), text)
        except TimeoutError:
            outcome = Outcome.HUNG
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as failure:
            detail = f"{type(failure).__name__}: {failure}"[:200]
        detail = "" if outcome is Outcome.RIGHT else detail
        return Result(number, outcome, round(time.monotonic() - began, 2), detail)

    async def _post(self, body: dict[str, Any]) -> tuple[str, str]:
        """The answer's text, and the error that there was instead or behind it."""
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status >= 400:
                text = await response.text()
                try:
                    told = json.loads(text)["error"]
                    return "", f"{response.status} {told['code'] if 'code' in told else told['type']}"
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{response.status} {text[:60]!r}") from error
            if not body["stream"]:
                return "".join(choice["text"] for choice in (await response.json())["choices"]), ""
            text = ""
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return text, ""
                if line.startswith(b"data: "):
                    event = json.loads(data)
                    if "error" in event:
                        told = event["error"]
                        return text, f"in stream {told.get('code') if isinstance(told, dict) else told}"
                    text += "".join(choice["text"] for choice in event["choices"])
        raise ValueError("the stream broke off")


def _body(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}
