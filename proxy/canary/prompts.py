# SPDX-License-Identifier: Apache-2.0
"""What the canary sends: texts of its own, of all lengths, with and without a cached beginning."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from random import Random

_WORDS = """
    the of a to in is that it for was on as are with they at be this from have or by one had not but
    what all were when we there can an your which their said if do will each about how up out them then
    she many some so these would other into has more her two like him see time could no make than first
    been its who now people my made over did down only way find use may water long little very after
    words called just where most know get through back much before go good new write our used me man too
    any day same right
"""
LEAST_TOKENS = 8
LONG_EVERY = 8
"""One prompt in so many, on average, is longer than a chunk of the prefill server. Pairs take turns, so every
eighth would always be the same pairs'.
"""
LONGER = 1.25
"""Than a chunk, if the estimate of its tokens is right."""
DEFAULT_CHUNK = 512
MAX_PROMPT_TOKENS = 16384
REPEAT_EVERY = 3
"""One prompt in so many, on average, begins as an earlier one of its pair did."""
MAX_REMEMBERED = 64


class Prompts:
    """Makes the prompts for one model.

    Lengths are chosen in tokens, evenly on a logarithmic scale, so that they lie on and about the edges of
    blocks; a text's tokens are estimated by those of earlier texts.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._words = _WORDS.split()
        self._chars_per_token = 1.0
        """A tokenizer with more characters per token makes the first prompts shorter than intended."""
        self._remembered: deque[tuple[Hashable, str, str]] = deque(maxlen=MAX_REMEMBERED)

    def make(
        self, pair: Hashable, chunk: int | None, max_model_len: int, output_tokens: int
    ) -> tuple[str, str]:
        """Return a prompt, and the `cache_salt` with which it is to be sent to a pair.

        With a salt go the caches that the earlier prompt has filled, so no two pairs get the same one: KV
        that was wrong at one pair would make another one's answer differ.

        `chunk`: tokens that the prefill server computes per step; None if it does not say. `max_model_len`:
        the longest context, 0 if unknown.
        """
        longest = min(max_model_len or MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS) - output_tokens - LEAST_TOKENS
        chunk = chunk or DEFAULT_CHUNK
        tokens = math.exp(self._rng.uniform(math.log(LEAST_TOKENS), math.log(max(chunk, LEAST_TOKENS))))
        if self._rng.randrange(LONG_EVERY) == 0:
            tokens = LONGER * chunk
        chars = max(1, round(min(tokens, max(longest, 1)) * self._chars_per_token))
        beginning, salt = "", f"kvferry-canary-{self._rng.getrandbits(64):016x}"
        of_pair = [each for each in self._remembered if each[0] == pair]
        if of_pair and self._rng.randrange(REPEAT_EVERY) == 0:
            _, earlier, salt = self._rng.choice(of_pair)
            beginning = earlier[: self._rng.randrange(len(earlier) + 1)]
        prompt = (beginning + self._text(chars - len(beginning)))[:chars]
        self._remembered.append((pair, prompt, salt))
        return prompt, salt

    def learn(self, prompt: str, tokens: int) -> None:
        """Note how many tokens a prompt had."""
        if tokens > 0:
            self._chars_per_token += 0.2 * (len(prompt) / tokens - self._chars_per_token)

    def _text(self, chars: int) -> str:
        """Words, numbers and signs in random order."""
        rng, parts, length = self._rng, [], 0
        while length < chars:
            part = rng.choice(self._words) if rng.random() < 0.8 else str(rng.randrange(10**4))
            part += rng.choice((" ", " ", " ", ", ", ". ", "\n", "+", "="))
            parts.append(part)
            length += len(part)
        return "".join(parts)
