# SPDX-License-Identifier: Apache-2.0
"""Which agents the beginnings of prompts are pulled from, and how much of a prompt is worth it."""

from __future__ import annotations

from kvferry.agent.block_hashes import BlockHash
from kvferry.agent.engine.admission import Limits
from kvferry.agent.engine.sequence import Sequence
from kvferry.agent.lender import Lender, find_lender
from kvferry.agent.messages.requests import PrefixSource
from kvferry.transfer.plane import MAX_LOAN_BLOCKS


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
        return find_lender(self._lenders, source)
