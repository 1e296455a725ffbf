# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a server that beginnings of prompts are pulled from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")

PAUSE_S, MAX_PAUSE_S = 30.0, 960.0
"""How long an agent is not asked after a failure, doubled with each failure upon another up to the second:
it may be out of reach from here for good, and a prompt that asks it is late by the time limit."""
MAX_LENDERS = 256
"""Agents that something is remembered of; one more replaces the oldest."""


@dataclass(eq=False, slots=True)
class Lender:
    """An agent that prefixes are pulled from. Until it has answered once, and again after a failure, it is
    asked by one prompt at a time.
    """

    has_answered: bool = False
    num_asking: int = 0
    paused_until: float = 0.0
    next_pause_s: float = PAUSE_S

    def may_be_asked(self, now: float) -> bool:
        return now >= self.paused_until and (self.has_answered or not self.num_asking)

    def answered(self) -> None:
        self.has_answered, self.next_pause_s = True, PAUSE_S

    def failed(self, now: float) -> None:
        """Leave it alone; of failures that come together the first one counts."""
        if now >= self.paused_until:
            self.has_answered, self.paused_until = False, now + self.next_pause_s
            self.next_pause_s = min(2 * self.next_pause_s, MAX_PAUSE_S)


def find_lender(lenders: dict[K, Lender], key: K) -> Lender:
    """Return one of them; a new one may replace the oldest."""
    lender = lenders.setdefault(key, Lender())
    if len(lenders) > MAX_LENDERS:
        del lenders[next(iter(lenders))]
    return lender
