# SPDX-License-Identifier: Apache-2.0
"""What is sent: prompts of random words with a given number of tokens, answer lengths, and arrival times.

No tokenizer is needed: how many tokens a word takes is measured at a server, by the usage that it reports.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.deploy.bench.arrivals import SizedArrival, poisson
from kvferry.deploy.bench.config import BenchConfig, Level

WORDS = tuple(
    """
    river stone light garden winter market copper signal harbor velvet thunder meadow lantern orbit
    silver canyon paper forest mirror summit engine violet anchor desert bridge feather island
    candle marble ocean pepper quarry ribbon saddle timber urgent valley walnut yellow zephyr basket
    cinder dragon ember falcon glacier hollow ivory jungle kernel lagoon magnet needle oyster pillar
    quiver rocket sunset tunnel umbra vessel whisper amber breeze
    """.split()  # noqa: SIM905
)
FEW, MORE = 4, 20
"""Words of the first two prompts that are measured."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `due_s` is when to send it, from the start of its round; 0: as soon as one ends.

    Only `/v1/completions` takes a prompt of token ids.
    """

    due_s: float
    prompt: str | list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TokensPerWord:
    """How a server counts: `fixed` tokens in every prompt, and `each` per word."""

    fixed: float
    each: float

    def num_words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.each))


async def measure_tokens(count: Callable[[str], Awaitable[int]], longest: int) -> TokensPerWord:
    """Return how the tokens of prompts grow with their words, the longest prompt among them.

    `count` returns the prompt tokens that a server reports for a text. Raises ValueError where these do not
    grow with it: such a server counts something else, or cuts prompts off.
    """
    rng = random.Random(0)
    few, more = await count(_words(rng, FEW)), await count(_words(rng, MORE))
    each = (more - few) / (MORE - FEW)
    if each <= 0:
        raise ValueError(f"a prompt of {FEW} words is said to have {few} tokens, one of {MORE} words {more}")
    words = TokensPerWord(few - FEW * each, each).num_words(longest)
    if words > MORE:
        many = await count(_words(rng, words))
        if many - few < (words - FEW) * each / 2:
            raise ValueError(f"a prompt of {MORE} words is said to have {more} tokens, one of {words} {many}")
        each = (many - few) / (words - FEW)
    return TokensPerWord(few - FEW * each, each)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent to each server, by number, in each round.

    Lengths and times follow from the configuration, its seed included, and are the same for every server.
    The words differ from server to server, so that two URLs of one fleet do not fill each other's prefix
    caches, and by `run_id` from run to run. `trace`: the requests to replay, of all rounds.
    """

    config: BenchConfig
    tokens: TokensPerWord
    run_id: str
    trace: Sequence[SizedArrival] = ()

    def requests(self, level: Level, round_number: int, server: int) -> Iterator[PlannedRequest]:
        """Yield the requests of one round to one server."""
        rng = random.Random(f"{self.config.seed} {level} {round_number}")
        words_rng = random.Random(f"{self.run_id} {level} {round_number} {server}")
        for due_s, prompt_tokens, output_tokens in self._sizes(level, round_number, rng):
            prompt = _words(words_rng, self.tokens.num_words(prompt_tokens))
            yield PlannedRequest(due_s, prompt, output_tokens)

    def _sizes(self, level: Level, round_number: int, rng: random.Random) -> Iterator[SizedArrival]:
        """Yield when each request of a round is due, and its lengths."""
        number = round_size(self.config, round_number)
        if level.kind == "speed":
            first = sum(round_size(self.config, earlier) for earlier in range(round_number))
            part = self.trace[first : first + number]
            yield from (each._replace(at=(each.at - part[0].at) / level.value) for each in part)
            return
        prompts, outputs = self.config.prompt_lengths, self.config.output_lengths
        if level.kind == "rate":
            yield from poisson(prompts.choose, outputs.choose, level.value, number, rng)
            return
        yield from (SizedArrival(0.0, prompts.choose(rng), outputs.choose(rng)) for _ in range(number))

    def warmup(self, server: int) -> list[PlannedRequest]:
        """Return the requests of which nothing is counted: of the longest prompts and answers."""
        rng = random.Random(f"{self.run_id} warmup {server}")
        prompt_tokens, output_tokens = longest(self.config, self.trace)
        words = self.tokens.num_words(prompt_tokens)
        return [PlannedRequest(0.0, _words(rng, words), output_tokens) for _ in range(self.config.warmup)]


def longest(config: BenchConfig, trace: Sequence[SizedArrival]) -> tuple[int, int]:
    """Return the tokens of the longest prompt and the longest answer; of a trace, of its longest request."""
    if not trace:
        return config.prompt_lengths.longest, config.output_lengths.longest
    largest = max(trace, key=lambda each: each.prompt_tokens + each.answer_tokens)
    return largest.prompt_tokens, largest.answer_tokens


def round_size(config: BenchConfig, round_number: int) -> int:
    """Return the number of requests to each target in a round: those of the level divided evenly."""
    size, left = divmod(config.requests, config.num_rounds)
    return size + (round_number < left)


def _words(rng: random.Random, number: int) -> str:
    return " ".join(rng.choices(WORDS, k=number))
