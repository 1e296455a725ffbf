# SPDX-License-Identifier: Apache-2.0
"""What a client may have done at each token, as a table: each kind of it at its limits, in many choices.

A step is everybody's. So another client's stream beside such a request must go on about as fast as beside one
of as many choices that asks for nothing.
"""

from __future__ import annotations

import asyncio
import json
import string
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from kvferry.deploy.launcher import Cluster
from tests.abuse.watch import MODEL
from tests.helpers.metrics import scrape, total
from tests.helpers.waiting import patient, until

CHOICES = 40
TOKENS = 1900
BEGIN_S = 10.0
"""How long it is waited for an attack's first step; what takes longer is costly before it shows."""
QUIET_S = 60.0
LOOK_S = 0.05
WINDOW_S = 2.0
LEAST_SHARE = 0.3
"""Of the rate beside a plain request."""
PLAIN = "nothing"


def costly_grammar(count: int, first: str = "") -> str:
    """A mask of it works on all of its terminals: of 900, for 0.15 s."""
    names = " | ".join(f"T{number}" for number in range(count))
    terms = "\n".join(
        f"T{number}: /[a-z]*{string.ascii_lowercase[number % 26]}[a-z]{{{number % 60 + 20}}}{number}/"
        for number in range(count)
    )
    return f"start: {first} ({names})+\n{terms}"


COSTLY_LATER = costly_grammar(300, "/~{40}/")
"""Its first 40 masks are cheap: more than are tried."""
LETTERS = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]
GOES_ON = {"ignore_eos": True, "temperature": 1.0}
"""An answer with a grammar ends by itself; these do not."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: GOES_ON,
    "a costly grammar": {"guided_grammar": costly_grammar(900)},
    "a grammar that is costly later": {"guided_grammar": COSTLY_LATER},
    "a JSON schema of 200 members": {
        "guided_json": {
            "type": "object",
            "properties": {f"member_{number}": {"type": "string"} for number in range(200)},
            "required": [f"member_{number}" for number in range(200)],
        }
    },
    "16 stop strings": {"stop": ["\x01" * 48 + "~" * number for number in range(16)], **GOES_ON},
    "stop strings that the text begins": {
        "stop": ["a" * 500 + "b", "c" + "a" * 500],
        "allowed_token_ids": [ord("a")],
        **GOES_ON,
    },
    "1,024 stop tokens": {"stop_token_ids": [899] * 1024, "min_tokens": TOKENS, **GOES_ON},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        **GOES_ON,
    },
    "300 biases": {"logit_bias": {str(token): -1.0 for token in range(300)}, **GOES_ON},
    "20 log probabilities": {"logprobs": 20, **GOES_ON},
    "256 bad words": {"bad_words": [f"{pair}zqzqzqzq" for pair in LETTERS[:256]], **GOES_ON},
    "900 allowed tokens": {"allowed_token_ids": list(range(900)), **GOES_ON},
    "top_k, top_p and min_p": {"top_k": 500, "top_p": 0.99, "min_p": 0.001, **GOES_ON},
}


def attack(kind: str, **changes: Any) -> dict[str, Any]:
    """The body of a request of this kind."""
    body = {"model": MODEL, "prompt": "1+1=", "n": CHOICES, "max_tokens": TOKENS}
    return {**body, **KINDS[kind], **changes}


class Victim:
    """One stream of an ordinary client, again and again, and when its events came."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.events: list[float] = []

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Keep it going while open; it must succeed. It has begun when this is entered."""
        async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession(timeout=NO_LIMIT) as http:
            stream = tasks.create_task(self._stream(http))
            await until(lambda: self.events, 60)
            yield
            stream.cancel()

    async def rate(self, seconds: float) -> float:
        """Return how many events come in a second, in so many."""
        before = len(self.events)
        began = time.monotonic()
        await asyncio.sleep(seconds)
        return (len(self.events) - before) / (time.monotonic() - began)

    async def _stream(self, http: aiohttp.ClientSession) -> None:
        body = {"model": MODEL, "prompt": "An ordinary question.", "max_tokens": 1900, "ignore_eos": True}
        while True:
            async with http.post(
                f"{self._url}/v1/completions", json={**body, "stream": True, "temperature": 0}
            ) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    assert b'"error"' not in line, line
                    if line.startswith(b"data: {"):
                        self.events.append(time.monotonic())


NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_read=120)


async def rate_beside(victim: Victim, cluster: Cluster, kind: str) -> float:
    """Return the victim's rate beside a request of this kind, which is left then, or refused at once."""
    decode = cluster.agents["decode-0"].url
    async with asyncio.timeout(patient(QUIET_S)):
        while await num_sequences(decode) > 1:  # the attack before is not over
            await asyncio.sleep(LOOK_S)
    async with aiohttp.ClientSession(timeout=NO_LIMIT) as http:
        asked = asyncio.ensure_future(post(http, cluster.url, attack(kind)))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEGIN_S):
                    while not asked.done() and await num_sequences(decode) <= 1:
                        await asyncio.sleep(LOOK_S)
            rate = await victim.rate(WINDOW_S)
            if asked.done():
                check_refused(*asked.result())
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    return rate


async def num_sequences(url: str) -> float:
    """How many sequences an agent has, the waiting ones included."""
    samples = await scrape(url)
    return sum(total(samples, f"kvferry_agent_num_requests_{state}") for state in ("running", "waiting"))


async def post(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
    async with http.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.text()


def check_refused(status: int, text: str) -> None:
    """By name."""
    assert status == 400, (status, text[:500])
    assert json.loads(text)["error"]["code"] in ("invalid_grammar", "grammar_too_costly"), text
