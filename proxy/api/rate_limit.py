# SPDX-License-Identifier: Apache-2.0
"""Rate limits of a client, on requests and tokens, as token buckets.

How many tokens a request uses is known only when it has ended, if then. So a request is admitted while the
bucket is not empty, and reserves as many as it may use (`TokenReservation`): its prompt's, and for its answer
what it asked for, at most as many as the bucket holds when it is full. When it has ended, what it did not use
is refunded, and what it used beyond that is charged. The bucket's level may become negative, and then the
client waits: in the long run the rate holds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvferry.proxy.errors import RateLimited

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RATE = re.compile(r"(\d{1,12})/(s|min|h)")


@dataclass(frozen=True, slots=True)
class Rate:
    """`amount` (at least one) per `within_s` seconds, which is also the largest burst."""

    amount: int
    within_s: float

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Parse `600/min`; also `/s` and `/h`. Raises `ValueError`."""
        match = _RATE.fullmatch(text)
        if match is None or not int(match[1]):
            raise ValueError(f"{text!r} is not a rate such as 10/s, 600/min or 1000/h")
        return cls(int(match[1]), _SECONDS[match[2]])


class Bucket:
    """A token bucket with a capacity of `rate.amount`, full at first. `now` is in monotonic seconds."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._level = float(rate.amount)
        self._at = float("-inf")

    def wait_s(self, now: float) -> float:
        """How long until its level is 1; 0 if it is."""
        self._refill(now)
        return max(0.0, (1.0 - self._level) * self._rate.within_s / self._rate.amount)

    def charge(self, amount: float, now: float) -> None:
        """Take `amount` from the level, which may become negative."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        gained = (now - self._at) * self._rate.amount / self._rate.within_s
        self._level = min(self._level + gained, float(self._rate.amount))
        self._at = now


class RateLimit:
    """One client's buckets in this process; None for what is not limited."""

    def __init__(self, requests: Rate | None, tokens: Rate | None) -> None:
        self._requests = None if requests is None else Bucket(requests)
        self._tokens = None if tokens is None else Bucket(tokens)
        self._most_tokens = 0 if tokens is None else tokens.amount

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited."""
        return self._tokens is not None

    def admit(self, now: float) -> None:
        """Charge one request. Raises `RateLimited`, and then charges nothing."""
        if self._requests is not None:
            _check(self._requests, "requests", now)
        if self._tokens is not None:
            _check(self._tokens, "tokens", now)
        if self._requests is not None:
            self._requests.charge(1, now)

    def reserve(self, prompt: int, answer: float, now: float) -> int:
        """Charge a request's tokens, of the answer's at most a full bucket; returns how many.

        Raises `RateLimited`, and then takes back what `admit` has charged.
        """
        if self._tokens is None:
            return 0
        try:
            _check(self._tokens, "tokens", now)
        except RateLimited:
            if self._requests is not None:
                self._requests.charge(-1, now)
            raise
        reserved = prompt + int(min(answer, self._most_tokens))
        self._tokens.charge(reserved, now)
        return reserved

    def charge(self, tokens: int, now: float) -> None:
        """Charge tokens; give them back if negative."""
        if self._tokens is not None:
            self._tokens.charge(tokens, now)


def _check(bucket: Bucket, unit: str, now: float) -> None:
    wait_s = bucket.wait_s(now)
    if wait_s > 0:
        raise RateLimited(
            f"this key has reached its limit of {unit}", retry_after_s=max(1, math.ceil(wait_s))
        )
