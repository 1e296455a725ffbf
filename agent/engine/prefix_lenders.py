# SPDX-License-Identifier: Apache-2.0
"""Which agents the beginnings of prompts are pulled from, and how much of a prompt is worth it."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.agent.engine.admission import Limits
from kvferry.agent.engine.blocks import BlockHash
from kvferry.agent.engine.sequence import Sequence
from kvferry.agent.messages.requests import PrefixSource
from kvferry.transfer.plane import MAX_LOAN_BLOCKS

PAUSE_S, MAX_PAUSE_S = 30.0, 960.0
"""How long an agent is not asked after a failure, doubled with each failure upon another up to the second:
it may be out of reach from here for good, and a prompt that asks it is late by the time limit."""
_MAX_LENDERS = 256
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


class KnownLenders:
    """What is remembered of the agents that were asked."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lenders: dict[PrefixSource, Lender] = {}

    def wanted(self, sequence: Sequence, now: float) -> list[BlockHash]:
        """Hashes of the full blocks without KV that another agent is to be asked for, of a sequence that has
        its blocks; none unless it may be asked and they are enough. The last token is left: its logits are
        wanted.
        """
        source = sequence.request.prefix_source
        if source is None or not self._limits.prefix_cache or sequence.request.scores_prompt:
            return []
        lender = self._lenders.get(source)
        if lender is not None and not lender.may_be_asked(now):
            return []
        hashes = sequence.full_block_hashes(self._limits.block_size, sequence.request.prompt_len - 1)
        missing = hashes[sequence.num_remembered :][:MAX_LOAN_BLOCKS]
        return missing if len(missing) * self._limits.block_size >= max(source.min_tokens, 1) else []

    def find(self, source: PrefixSource) -> Lender:
        """Return what is remembered of an agent."""
        lender = self._lenders.setdefault(source, Lender())
        if len(self._lenders) > _MAX_LENDERS:
            del self._lenders[next(iter(self._lenders))]
        return lender
