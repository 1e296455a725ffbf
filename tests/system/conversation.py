# SPDX-License-Identifier: Apache-2.0
"""A conversation through a cluster, turn by turn, and what its agents computed and moved for each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import Answer, complete
from tests.helpers.metrics import Samples, scrape, total
from tests.helpers.waiting import patient

TURNS = 8
FIRST_TOKENS = 256
"""Of the first prompt: a system prompt and a question."""
QUESTION_TOKENS = 48
ANSWER_TOKENS = 64
_SETTLE_S = 10.0
_BYTES = {
    "pulled_bytes": "kvferry_transfer_bytes_total",
    "prefix_bytes": "kvferry_transfer_prefix_pull_bytes_total",
}


@dataclass(slots=True)
class Turn:
    """One turn: its prompt and answer, and what it added to the counters of the agents of each role.

    Counters are bytes, and prompt tokens by where their KV came from: computed, cached, pulled,
    pulled_prefix.
    """

    prompt: list[int]
    answer: Answer
    prefill: Counter[str] = field(default_factory=Counter)
    decode: Counter[str] = field(default_factory=Counter)


class Conversation:
    """A user who asks, waits for the answer, and asks again with all that was said before."""

    def __init__(
        self,
        cluster: Cluster,
        http: aiohttp.ClientSession,
        seed: int = 0,
        first_tokens: int = FIRST_TOKENS,
    ) -> None:
        self._cluster = cluster
        self._http = http
        self._random = random.Random(seed)
        self.prompt = self._words(first_tokens)
        """The next turn's."""
        self.turns: list[Turn] = []

    async def ask(self, **fields: Any) -> Turn:
        """Take the next turn. Of several choices the first one is gone on from."""
        before = {role: await self._counters(role) for role in ("prefill", "decode")}
        prompt = self.prompt
        answer = await complete(self._http, self._cluster.url, self.body(prompt, **fields))
        turn = Turn(prompt, answer)
        turn.prefill = await self._added("prefill", before["prefill"], len(prompt))
        turn.decode = await self._added("decode", before["decode"], len(prompt))
        self.prompt = [*prompt, *answer.choices[0].token_ids, *self._words(QUESTION_TOKENS)]
        self.turns.append(turn)
        return turn

    @staticmethod
    def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
        """The request for a turn; every answer has its full length."""
        return {
            "model": "ferry-tiny",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
            "seed": 1,
            "logprobs": 0,
            **fields,
        }

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(10, 200) for _ in range(count)]

    async def _added(self, role: str, before: Counter[str], num_tokens: int) -> Counter[str]:
        """What was added to a role's counters; they come a little late, so the prompt must be in them."""
        async with asyncio.timeout(patient(_SETTLE_S)):
            while True:
                added = await self._counters(role)
                added.subtract(before)
                if (
                    sum(added[source] for source in ("computed", "cached", "pulled", "pulled_prefix"))
                    >= num_tokens
                ):
                    return added
                await asyncio.sleep(0.05)

    async def _counters(self, role: str) -> Counter[str]:
        counters: Counter[str] = Counter()
        for name, agent in self._cluster.agents.items():
            if name.startswith(role):
                counters.update(counters_of(await scrape(agent.url)))
        return counters


def counters_of(samples: Samples) -> Counter[str]:
    """Prompt tokens by source, and bytes, of one agent."""
    counters = Counter({name: int(total(samples, metric)) for name, metric in _BYTES.items()})
    for (name, labels), value in samples.items():
        if name == "kvferry_agent_prompt_tokens_by_source_total":
            counters[dict(labels)["source"]] += int(value)
    return counters
