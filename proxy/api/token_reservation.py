# SPDX-License-Identifier: Apache-2.0
"""The tokens of one request of a client whose tokens are limited: reserved, and settled when it has ended.

A complete answer reports in its usage what was used; a stream that was cut counts with what was relayed. When
nothing says how much of an answer agents have made (it was not streamed, and the client left or the request
failed), it counts with as much as that can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.proxy.api.rate_limit import RateLimit
from kvferry.proxy.fleet.routing.routing_request import routing_request
from kvferry.proxy.request import ClientRequest, ReportedUsage

TOKENS_PER_S = 2000
"""More than any engine makes for one choice: what has been made unseen is no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """What is known of a request when it has ended.

    `usage` is what its answer reports, and `sent` how many tokens of a stream were relayed. `unseen`: whether
    agents may have made more than that. `refused`: whether it was refused for the time being, not served.
    `leg_seconds`: how long each leg took that there was.
    """

    usage: ReportedUsage | None
    sent: int
    unseen: bool
    refused: bool
    leg_seconds: Mapping[str, float]


class TokenReservation:
    """Reserves what a request may use. Call `settle` once. Raises `RateLimited`.

    `max_model_len` bounds an answer for which the client has set no limit; None if it is not known.
    """

    def __init__(
        self, limit: RateLimit, request: ClientRequest, max_model_len: int | None, now: float
    ) -> None:
        self._limit = limit
        self._choices = request.sequences
        self._prompt = routing_request(request, None).tokens
        self._most: float = float("inf")
        """Tokens of one choice."""
        if request.max_tokens is not None:
            self._most = request.max_tokens
        elif max_model_len is not None:
            self._most = max_model_len
        self._reserved = limit.reserve(self._prompt, self._most * self._choices, now)

    def settle(self, end: RequestEnd, now: float) -> None:
        """Charge what the request has used, in place of what was reserved."""
        self._limit.charge(self._used(end) - self._reserved, now)

    def _used(self, end: RequestEnd) -> int:
        if end.usage is not None:
            return end.usage.prompt_tokens + end.usage.completion_tokens
        if end.refused or not end.leg_seconds.keys() & {"prefill", "decode"}:
            return 0  # no agent has worked on it
        return self._prompt + max(end.sent, self._made_unseen(end.leg_seconds) if end.unseen else 0)

    def _made_unseen(self, leg_seconds: Mapping[str, float]) -> int:
        """How many tokens agents can have made at most: one each by the prefill leg, the others after it."""
        seconds = leg_seconds.get("decode", 0.0)
        if self._choices > 1:  # with other engines, some are decoded while others are still in prefill
            seconds += leg_seconds.get("prefill", 0.0)
        return int(min(self._most, 1 + seconds * TOKENS_PER_S)) * self._choices
