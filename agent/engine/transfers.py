# SPDX-License-Identifier: Apache-2.0
"""Leases and pulls of the scheduler: blocks leased to a reader, being pulled into, or in quarantine.

The ledger outlives the requests it serves: an aborted request's blocks come back by the plane's event, never
before (I3), and a lease's blocks are freed only after its end is committed (I1).

A prompt may also be pulled in part: a *prefix*, lent by the cache of another agent. A loan is a lease like
any other, over blocks that the prefix cache names: they are found by the hashes of all tokens up to each
block's end, cache_salt included. A prefix is pulled and proven like any KV; until then, and whenever that
fails, it counts as not computed (I1).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec

from kvferry.agent.announce.work_counts import WorkCounts
from kvferry.agent.block_hashes import BlockHash, hash_prompt
from kvferry.agent.engine.admission import Limits
from kvferry.agent.engine.blocks import BlockAllocator
from kvferry.agent.engine.sequence import Request, Sequence
from kvferry.agent.lender import Lender
from kvferry.agent.messages.requests import RemoteKV, SamplingParams, Token, TokenLogprob
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.events import NO_FAULT, LeaseEnded, LoanRequested, PullDone, PullFailed
from kvferry.transfer.ids import new_transfer_id
from kvferry.transfer.plane import MAX_LOAN_S, one_group
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens


@dataclass(eq=False, slots=True)
class _Lease:
    blocks: list[int]
    request: Request | None = None
    """The request that still fills the blocks; None once its output is out, and for a loan."""


@dataclass(eq=False, slots=True)
class _Pull:
    """A sequence's blocks: `before` have their KV, `destination` is written to, `after` is for later."""

    before: list[int]
    destination: list[int]
    sequence: Sequence | None
    """The sequence that waits for the KV; None once it is abandoned."""
    producer: str
    """Its incarnation."""
    began_at: float
    after: list[int] = field(default_factory=list)
    """Of a prefix."""
    lender: Lender | None = None
    """Of a prefix."""

    @property
    def blocks(self) -> list[int]:
        return [*self.before, *self.destination, *self.after]


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How the pull ended that a sequence waits for. Without `failure` it has its blocks again, and what came
    is complete and proven; with it, it has none.
    """

    sequence: Sequence
    began_at: float
    backend: str
    failure: str | None = None
    is_prefix: bool = False
    num_tokens: int = 0
    """Of the prompt, pulled; of a whole one all that was not cached."""


class TransferLedger:
    """Books of leases, pulls and quarantines, by transfer id. Every change goes to the connector."""

    def __init__(
        self, limits: Limits, allocator: BlockAllocator, connector: SchedulerConnector, work: WorkCounts
    ) -> None:
        self._limits = limits
        self._work = work
        self._allocator = allocator
        self._connector = connector
        self._leases: dict[str, _Lease] = {}
        self._held: set[str] = set()
        self._pulls: dict[str, _Pull] = {}
        self._quarantine: dict[str, list[int]] = {}

    def is_known(self, transfer_id: str) -> bool:
        """Whether a request or a block is bound to this id; another request must not use it then."""
        books = (self._leases, self._held, self._pulls, self._quarantine)
        return any(transfer_id in book for book in books)

    # Producer.

    def open_lease(self, sequence: Sequence, now: float) -> None:
        """Lease a sequence's prompt blocks, of which only those of a cached prefix are readable yet.

        Raises:
            DuplicateTransfer: the id was used before; nothing changed.
        """
        request, blocks = sequence.request, list(sequence.blocks)
        transfer_id, ids = _produced(request), request.submit.prompt_ids
        self._connector.register(
            transfer_id, one_group(blocks), len(ids), hash_prompt(ids), request.deadline - now
        )
        self._allocator.lease(blocks)
        self._leases[transfer_id] = _Lease(blocks, request)
        if sequence.num_remembered:
            self.advance(request, sequence.num_remembered)

    def advance(self, request: Request, num_blocks: int) -> None:
        """Make the first blocks readable: they are complete on every rank. No-op once the lease has ended."""
        self._connector.advance(_produced(request), num_blocks)

    def complete_lease(self, request: Request, tokens: Seq[Token]) -> None:
        """Only a reader needs the prompt from now on; it is computed. No-op if the lease has ended."""
        transfer_id = _produced(request)
        lease = self._leases.get(transfer_id)
        if lease is not None:
            lease.request = None
            self._connector.ready(transfer_id, to_wire(tokens, request.cached_tokens or 0))

    def withdraw(self, request: Request) -> None:
        """End a lease that is not complete: in the plane first, then its blocks."""
        transfer_id = _produced(request)
        lease = self._leases.pop(transfer_id, None)
        if lease is not None:
            self._connector.withdraw(transfer_id)
            self._allocator.end_lease(lease.blocks)

    def drop(self, transfer_id: str) -> None:
        """End a lease whose reader will not come; its blocks come back by the plane's event."""
        self._connector.drop(transfer_id)

    def grant_prefix(self, event: LoanRequested, reserve: int) -> None:
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
            self._leases[event.transfer_id] = _Lease(blocks)

    def lease_ended(self, event: LeaseEnded) -> Request | None:
        """Free a lease's blocks. Returns the request that was still filling them, if it must end for that.

        A reader that releases early has abandoned its pull, but waits for the first tokens.
        """
        lease = self._leases.pop(event.transfer_id, None)
        if lease is None:
            return None
        self._allocator.end_lease(lease.blocks)
        return lease.request if event.cause != "released" else None

    # Consumer.

    def pulling(self) -> list[Sequence]:
        """Sequences that wait for a pull."""
        return [pull.sequence for pull in self._pulls.values() if pull.sequence is not None]

    def pull_deadline(self, request: Request) -> float:
        """When a pull from a prefill that is complete must have ended, the wait for room included."""
        return min(request.deadline, request.clock.arrived + self._limits.pull_timeout_s)

    def hold(self, request: Request) -> None:
        """Keep the producer's lease alive while there is no room for the prompt's KV.

        Raises:
            DuplicateTransfer: the id is in use; nothing changed.
        """
        kv = _pulled(request)
        timeout_s = min(request.submit.timeout_s, self._limits.pull_timeout_s)
        self._connector.hold(kv.transfer_id, kv.source, timeout_s)
        self._held.add(kv.transfer_id)

    def start_pull(self, sequence: Sequence, now: float) -> None:
        """Pull the prompt's KV into a sequence's blocks, all but those of its cached prefix.

        The blocks are the ledger's until the pull has ended. A prefill that still runs may take until the
        request's deadline; the rest of the pull may take no longer than any other.
        """
        request, blocks, num_shared = sequence.request, sequence.blocks, sequence.num_remembered
        kv = _pulled(request)
        timeout_s, fill_s = self.pull_deadline(request) - now, 0.0
        if request.awaits_first_tokens:
            timeout_s = min(self._limits.pull_timeout_s, request.deadline - now)
            fill_s = request.deadline - now - timeout_s
        self._held.remove(kv.transfer_id)
        self._pulls[kv.transfer_id] = _Pull(
            blocks[:num_shared], blocks[num_shared:], sequence, kv.source.engine_id, now
        )
        sequence.blocks = []
        ids_hash = hash_prompt(request.submit.prompt_ids)
        missing = one_group(blocks, num_shared)
        self._connector.pull(kv.transfer_id, kv.source, missing, timeout_s, ids_hash, fill_s)

    def start_prefix_pull(
        self, sequence: Sequence, lender: Lender, hashes: list[BlockHash], now: float
    ) -> None:
        """Ask for blocks of the prompt that the sequence lacks. Its own are the ledger's until the end."""
        request, blocks, num_known = sequence.request, sequence.blocks, sequence.num_remembered
        assert request.prefix_source is not None
        upto = num_known + len(hashes)
        source = request.prefix_source.agent(len(hashes) * self._limits.block_size)
        lender.num_asking += 1
        request.prefix_pull = transfer_id = new_transfer_id()
        self._pulls[transfer_id] = pull = _Pull(
            blocks[:num_known],
            blocks[num_known:upto],
            sequence,
            source.engine_id,
            now,
            after=blocks[upto:],
            lender=lender,
        )
        sequence.blocks = []
        timeout_s = min(MAX_LOAN_S, self._limits.pull_timeout_s, request.deadline - now)
        self._connector.pull_prefix(transfer_id, source, pull.destination, hashes, timeout_s)

    def abandon_pull(self, request: Request) -> None:
        """Cancel what is held or pulled for a request; blocks come back by the plane's event."""
        transfer_id = request.prefix_pull if request.produces else _pulled(request).transfer_id
        if transfer_id is None:
            return
        self._held.discard(transfer_id)
        if transfer_id in self._pulls:
            self._pulls[transfer_id].sequence = None
        self._connector.cancel(transfer_id)

    def pull_done(self, event: PullDone) -> PullOutcome | None:
        """Move the blocks to the sequence that waits; None, and blocks freed, if none does.

        KV without the first tokens that a streamed request awaits is of no use.
        """
        pull = self._pulls.pop(event.transfer_id, None)
        if pull is None:
            return None
        if pull.lender is None:
            self._work.pull_done(pull.producer, event)
        else:
            pull.lender.num_asking -= 1
            pull.lender.answered()
        sequence = pull.sequence
        if sequence is None:
            self._allocator.release(reversed(pull.blocks))
            return None
        if pull.lender is not None:
            return self._prefix_done(sequence, pull, event)
        request = sequence.request
        if request.awaits_first_tokens and not self._adopt(request, event.first_tokens):
            self._allocator.release(reversed(pull.blocks))
            return PullOutcome(sequence, pull.began_at, event.backend, "no_first_tokens")
        sequence.blocks = pull.blocks
        sequence.num_computed = request.prompt_len
        request.timing = msgspec.structs.replace(
            request.timing,
            pull_wait_s=event.wait_s,
            pull_s=event.pull_s,
            pull_tail_s=event.tail_s,
            pull_early_blocks=event.early_blocks,
            pull_bytes=event.nbytes,
            pull_descriptors=event.descriptors,
            pull_began_at=event.began_at,
            rank_reads=event.rank_reads,
            backend=event.backend,
        )
        cached = len(pull.before) * self._limits.block_size
        return PullOutcome(sequence, pull.began_at, event.backend, num_tokens=request.prompt_len - cached)

    def _prefix_done(self, sequence: Sequence, pull: _Pull, event: PullDone) -> PullOutcome:
        """Give the blocks back to the sequence, its prefix longer by what came."""
        request, num_tokens = sequence.request, event.num_blocks * self._limits.block_size
        request.prefix_pull = request.prefix_source = None
        sequence.blocks = pull.blocks
        sequence.num_computed = (len(pull.before) + event.num_blocks) * self._limits.block_size
        request.prefix_tokens = num_tokens
        request.timing = msgspec.structs.replace(
            request.timing, prefix_pull_bytes=event.nbytes, prefix_tokens=num_tokens
        )
        return PullOutcome(sequence, pull.began_at, event.backend, is_prefix=True, num_tokens=num_tokens)

    def pull_failed(self, event: PullFailed, now: float) -> PullOutcome | None:
        """Free the blocks, through quarantine if a write may still come; None if no sequence waits.

        Unless the pull of a prefix was cancelled, its lender is not asked again for a while.
        """
        pull = self._pulls.pop(event.transfer_id, None)
        if pull is None:
            return None
        if pull.lender is not None:
            pull.lender.num_asking -= 1
        elif event.reason not in NO_FAULT:
            self._work.pull_failed(pull.producer, event)
        self._allocator.release(reversed([*pull.before, *pull.after]))
        if event.quiescent:
            self._allocator.release(pull.destination)
        else:
            self._allocator.quarantine(pull.destination)
            self._quarantine[event.transfer_id] = pull.destination
        if pull.sequence is None:
            return None
        request = pull.sequence.request
        if pull.lender is not None:
            pull.lender.failed(now)
            request.prefix_pull = request.prefix_source = None
        elif request.awaits_first_tokens:
            self._adopt(request, event.first_tokens)
        is_prefix = pull.lender is not None
        return PullOutcome(pull.sequence, pull.began_at, event.backend, event.reason, is_prefix)

    def pull_quiescent(self, transfer_id: str) -> None:
        """Free quarantined blocks: no write can come any more."""
        self._allocator.end_quarantine(self._quarantine.pop(transfer_id, []))

    def _adopt(self, request: Request, first: SampledTokens | None) -> bool:
        """Continue from the tokens that the prefill sampled. False if none can be the request's."""
        if first is None:
            return False
        tokens = from_wire(first, request.submit.sampling, self._limits.vocab_size)
        if tokens is None:
            return False
        request.cached_tokens = first.cached_tokens
        request.adopt(tokens)
        return True

    def holders(self) -> Iterator[list[int]]:
        """Every reference that the ledger holds, for the allocator's audit."""
        for lease in self._leases.values():
            yield lease.blocks
        for pull in self._pulls.values():
            yield pull.blocks


def to_wire(tokens: Seq[Token], cached_tokens: int) -> SampledTokens:
    """Token 1 of every choice, in order of their index, as the plane carries it to a streamed pull."""
    return SampledTokens(
        choices=tuple(_token_to_wire(token) for token in tokens), cached_tokens=cached_tokens
    )


def from_wire(first: SampledTokens, sampling: SamplingParams, vocab_size: int) -> tuple[Token, ...] | None:
    """Return the tokens as if they had been sampled here.

    None if they cannot be this request's: another number of choices, unknown ids, or no choice that
    continues, for which a prefill pins nothing.
    """
    if len(first.choices) != sampling.n or any(token.id >= vocab_size for token in first.choices):
        return None
    if sampling.max_tokens == 1 or all(token.finish for token in first.choices):
        return None
    return tuple(_token_from_wire(index, token) for index, token in enumerate(first.choices))


def _token_to_wire(token: Token) -> SampledToken:
    if token.logprob is None:
        return SampledToken(id=token.token_id, finish=token.finish)
    return SampledToken(
        id=token.token_id,
        finish=token.finish,
        logprob=token.logprob.logprob,
        margin=token.logprob.margin,
        top=token.logprob.top,
    )


def _token_from_wire(index: int, token: SampledToken) -> Token:
    logprob = None
    if token.logprob is not None:
        logprob = TokenLogprob(logprob=token.logprob, margin=token.margin, top=token.top)
    return Token(index=index, token_id=token.id, logprob=logprob, finish=token.finish)


def _produced(request: Request) -> str:
    assert request.submit.produce is not None
    return request.submit.produce


def _pulled(request: Request) -> RemoteKV:
    assert request.submit.remote is not None
    return request.submit.remote
