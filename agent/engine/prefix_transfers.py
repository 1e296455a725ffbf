# SPDX-License-Identifier: Apache-2.0
"""Prefixes lent by the cache of one agent and pulled into another's: a decode agent's and a prefill agent's.

A loan is a lease like any other (`transfer.producer.lease`), over blocks that the prefix cache names: they
are found by the hashes of all tokens up to each block's end, cache_salt included. A prefix is pulled
and proven like any KV; until then, and whenever that fails, it counts as not computed (I1). The books outlive
the requests, since blocks come back by the plane's event (I2, I3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvferry.agent.engine.admission import Limits
from kvferry.agent.engine.blocks import BlockAllocator, BlockHash
from kvferry.agent.engine.sequence import Request, Sequence
from kvferry.agent.messages.requests import PrefixSource
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.events import LeaseEnded, LoanRequested, PullDone, PullFailed
from kvferry.transfer.ids import new_transfer_id
from kvferry.transfer.plane import MAX_LOAN_BLOCKS, MAX_LOAN_S

PAUSE_S, MAX_PAUSE_S = 30.0, 960.0
"""How long an agent is not asked after a failure, doubled with each failure upon another up to the second:
it may be out of reach from here for good, and a prompt that asks it is late by the time limit."""
_MAX_LENDERS = 256
"""Agents that something is remembered of; one more replaces the oldest."""


@dataclass(eq=False, slots=True)
class _Lender:
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


@dataclass(eq=False, slots=True)
class _PulledPrefix:
    """A sequence's blocks: `before` have their KV, `destination` is written to, `after` is for later."""

    lender: _Lender
    before: list[int]
    destination: list[int]
    after: list[int]
    sequence: Sequence | None
    """None once it is abandoned."""


@dataclass(frozen=True, slots=True)
class PrefixOutcome:
    """How the pull of a prefix ended that a sequence waits for.

    Without `failure` it has blocks again, and what came is complete and proven; with it, it has none.
    """

    sequence: Sequence
    failure: str | None = None


class PrefixTransfers:
    """Books of prefixes that are lent and pulled, by transfer id. Every change goes to the connector."""

    def __init__(self, limits: Limits, allocator: BlockAllocator, connector: SchedulerConnector) -> None:
        self._limits = limits
        self._allocator = allocator
        self._connector = connector
        self._lent: dict[str, list[int]] = {}
        self._pulls: dict[str, _PulledPrefix] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._lenders: dict[PrefixSource, _Lender] = {}

    # Lending.

    def grant(self, event: LoanRequested, reserve: int) -> None:
        """Lease the blocks of the longest known run of these hashes, and say how many they are.

        Nothing is lent that would leave fewer than `reserve` blocks free for running sequences to grow into.
        """
        blocks = self._allocator.find_prefix(event.hashes) if self._limits.prefix_cache else []
        if self._allocator.num_free - self._allocator.num_cached(blocks) < reserve:
            blocks = []
        ids_hash = event.hashes[len(blocks) - 1].hex() if blocks else ""
        num_tokens = len(blocks) * self._limits.block_size
        if self._connector.grant_prefix(event.transfer_id, blocks, num_tokens, ids_hash):
            self._allocator.lease(blocks)
            self._lent[event.transfer_id] = blocks

    def loan_ended(self, event: LeaseEnded) -> None:
        """Unpin a loan's blocks; a lease that is none is ignored."""
        self._allocator.end_lease(self._lent.pop(event.transfer_id, []))

    # Pulling.

    def waiting(self) -> list[Sequence]:
        """Sequences that wait for a prefix."""
        return [each.sequence for each in self._pulls.values() if each.sequence is not None]

    def wants(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence that has its blocks lacks enough of its prompt to ask another agent for it."""
        source = sequence.request.prefix_source
        if source is None or not self._limits.prefix_cache or sequence.request.scores_prompt:
            return False
        lender = self._lenders.get(source)
        if lender is not None and not lender.may_be_asked(now):
            return False
        missing = len(self._missing(sequence)) * self._limits.block_size
        return missing >= max(source.min_tokens, 1)

    def start_pull(self, sequence: Sequence, now: float) -> None:
        """Ask for the prompt's blocks that the sequence lacks. Its own are in these books until the end."""
        request, blocks, num_known = sequence.request, sequence.blocks, sequence.num_remembered
        assert request.prefix_source is not None
        hashes = self._missing(sequence)
        upto = num_known + len(hashes)
        lender = self._lender(request.prefix_source)
        lender.num_asking += 1
        pull = _PulledPrefix(lender, blocks[:num_known], blocks[num_known:upto], blocks[upto:], sequence)
        transfer_id = new_transfer_id()
        timeout_s = min(MAX_LOAN_S, self._limits.pull_timeout_s, request.deadline - now)
        sequence.blocks = []
        request.prefix_pull = transfer_id
        self._pulls[transfer_id] = pull
        source = request.prefix_source.agent(len(hashes) * self._limits.block_size)
        self._connector.pull_prefix(transfer_id, source, pull.destination, hashes, timeout_s)

    def abandon(self, request: Request) -> None:
        """Cancel the pull of a request's prefix; blocks come back by the plane's event."""
        pull = self._pulls.get(request.prefix_pull or "")
        if pull is not None and request.prefix_pull is not None:
            pull.sequence = None
            self._connector.cancel(request.prefix_pull)

    def arrived(self, event: PullDone) -> PrefixOutcome | None:
        """Give the blocks back to the sequence, its prefix longer by what came; None if none waits."""
        pull = self._pulls.pop(event.transfer_id, None)
        if pull is None:
            return None
        pull.lender.num_asking -= 1
        pull.lender.answered()
        sequence, blocks = pull.sequence, self._blocks_of(pull)
        if sequence is None:
            self._allocator.release(reversed(blocks))
            return None
        request = sequence.request
        request.prefix_pull = request.prefix_source = None
        sequence.blocks = blocks
        sequence.num_computed = (len(pull.before) + event.num_blocks) * self._limits.block_size
        request.prefix_tokens = event.num_blocks * self._limits.block_size
        request.timing = msgspec.structs.replace(
            request.timing,
            prefix_pull_bytes=event.nbytes,
            prefix_tokens=request.prefix_tokens,
        )
        return PrefixOutcome(sequence)

    def failed(self, event: PullFailed, now: float) -> PrefixOutcome | None:
        """Free the blocks, through quarantine if a write may still come; None if no sequence waits.

        Unless the pull was cancelled, the agent is not asked again for a while.
        """
        pull = self._pulls.pop(event.transfer_id, None)
        if pull is None:
            return None
        pull.lender.num_asking -= 1
        self._allocator.release(reversed([*pull.before, *pull.after]))
        if event.quiescent:
            self._allocator.release(pull.destination)
        else:
            self._allocator.quarantine(pull.destination)
            self._quarantine[event.transfer_id] = pull.destination
        sequence = pull.sequence
        if sequence is None:
            return None
        pull.lender.failed(now)
        sequence.request.prefix_pull = sequence.request.prefix_source = None
        return PrefixOutcome(sequence, event.reason)

    def _lender(self, source: PrefixSource) -> _Lender:
        lender = self._lenders.setdefault(source, _Lender())
        if len(self._lenders) > _MAX_LENDERS:
            del self._lenders[next(iter(self._lenders))]
        return lender

    def quiescent(self, transfer_id: str) -> None:
        """Free quarantined blocks: no write can come any more."""
        self._allocator.end_quarantine(self._quarantine.pop(transfer_id, []))

    def holders(self) -> Iterator[list[int]]:
        """Every reference that these books hold, for the allocator's audit."""
        yield from self._lent.values()
        for pull in self._pulls.values():
            yield self._blocks_of(pull)

    def _missing(self, sequence: Sequence) -> list[BlockHash]:
        """Hashes of the full blocks that have no KV yet. The last token is left: its logits are wanted."""
        hashes = sequence.full_block_hashes(self._limits.block_size, sequence.request.prompt_len - 1)
        return hashes[sequence.num_remembered :][:MAX_LOAN_BLOCKS]

    @staticmethod
    def _blocks_of(pull: _PulledPrefix) -> list[int]:
        return [*pull.before, *pull.destination, *pull.after]
