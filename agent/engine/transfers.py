# SPDX-License-Identifier: Apache-2.0
"""Blocks in the hands of the transfer plane: leased to a reader, being pulled into, or in quarantine.

The ledger outlives the requests it serves: an aborted request's blocks come back by the plane's event, never
before (design I3), and a lease's blocks are freed only after its end is committed (design I1).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvferry.agent.engine.blocks import BlockAllocator, hash_prompt
from kvferry.agent.engine.messages import RemoteKV, SamplingParams, Token, TokenLogprob
from kvferry.agent.engine.sequence import Request, Sequence
from kvferry.transfer.first_tokens import FirstToken, FirstTokens
from kvferry.transfer.plane import Remote


class Connector(Protocol):
    """What the scheduler asks of `transfer.connector.SchedulerConnector`; nothing here waits."""

    def register(
        self, transfer_id: str, block_ids: Seq[int], num_tokens: int, ids_hash: str, timeout_s: float
    ) -> None: ...
    def advance(self, transfer_id: str, readable_blocks: int) -> None: ...
    def ready(self, transfer_id: str, first_tokens: FirstTokens | None = None) -> None: ...
    def fail(self, transfer_id: str) -> None: ...
    def drop(self, transfer_id: str) -> bool: ...
    def hold(self, transfer_id: str, remote: Remote, timeout_s: float) -> None: ...
    def pull(
        self,
        transfer_id: str,
        remote: Remote,
        block_ids: Seq[int],
        first_block: int,
        timeout_s: float,
        ids_hash: str | None = None,
        fill_s: float = 0.0,
    ) -> None: ...
    def cancel(self, transfer_id: str) -> None: ...


@dataclass(eq=False, slots=True)
class _Lease:
    blocks: list[int]
    request: Request | None
    """The request that still fills the blocks; None once its answer is out."""


@dataclass(eq=False, slots=True)
class _Pull:
    shared: list[int]
    """Blocks of a cached prefix, in front."""
    destination: list[int]
    sequence: Sequence | None
    """Who waits for the KV; None once nobody does."""


class TransferLedger:
    """Books of leases, pulls and quarantines, by transfer id; tells the connector about each change."""

    def __init__(self, allocator: BlockAllocator, connector: Connector) -> None:
        self._allocator = allocator
        self._connector = connector
        self._leases: dict[str, _Lease] = {}
        self._held: set[str] = set()
        self._pulls: dict[str, _Pull] = {}
        self._quarantine: dict[str, list[int]] = {}

    @property
    def num_pulls(self) -> int:
        return len(self._pulls)

    def is_known(self, transfer_id: str) -> bool:
        """Whether a request, or some block, is bound to this id; another request must not use it then."""
        books = (self._leases, self._held, self._pulls, self._quarantine)
        return any(transfer_id in book for book in books)

    # Producer.

    def open_lease(self, sequence: Sequence, timeout_s: float) -> None:
        """Lease a sequence's prompt blocks, before any of them is computed.

        Raises:
            DuplicateTransfer: the id was used before; nothing changed.
        """
        request = sequence.request
        transfer_id = _produced(request)
        ids = request.submit.prompt_ids
        self._connector.register(transfer_id, sequence.blocks, len(ids), hash_prompt(ids), timeout_s)
        self._allocator.lease(sequence.blocks)
        self._leases[transfer_id] = _Lease(list(sequence.blocks), request)

    def advance(self, request: Request, num_blocks: int) -> None:
        """Let the reader, if there is one still, see the first blocks: they are complete on every rank."""
        self._connector.advance(_produced(request), num_blocks)

    def hand_over(self, request: Request, first_tokens: FirstTokens) -> None:
        """The whole prompt is computed: from now on only the reader, if there is one still, needs its KV."""
        transfer_id = _produced(request)
        lease = self._leases.get(transfer_id)
        if lease is not None:
            lease.request = None
            self._connector.ready(transfer_id, first_tokens)

    def withdraw(self, request: Request) -> None:
        """End a lease that is not handed over. The plane knows before the allocator does."""
        transfer_id = _produced(request)
        lease = self._leases.pop(transfer_id, None)
        if lease is not None:
            self._connector.fail(transfer_id)
            self._allocator.end_lease(lease.blocks)

    def lease_ended(self, transfer_id: str) -> Request | None:
        """Free a lease's blocks; returns the request that was still filling them, if any."""
        lease = self._leases.pop(transfer_id, None)
        if lease is None:
            return None
        self._allocator.end_lease(lease.blocks)
        return lease.request

    # Consumer.

    def hold(self, request: Request, timeout_s: float) -> None:
        """Keep the producer's lease alive while there is no room for the prompt's KV.

        Raises:
            DuplicateTransfer: the id is in use; nothing changed.
        """
        kv = _pulled(request)
        self._connector.hold(kv.transfer_id, kv.source, timeout_s)
        self._held.add(kv.transfer_id)

    def start_pull(self, sequence: Sequence, num_shared: int, timeout_s: float, fill_s: float = 0.0) -> None:
        """Pull the prompt's KV into a sequence's blocks, all but the first `num_shared`.

        The blocks are the ledger's until the pull has ended: `timeout_s` at most after the prefill has, which
        may itself go on for `fill_s`.
        """
        kv = _pulled(sequence.request)
        transfer_id, blocks = kv.transfer_id, sequence.blocks
        self._held.remove(transfer_id)
        self._pulls[transfer_id] = _Pull(blocks[:num_shared], blocks[num_shared:], sequence)
        sequence.blocks = []
        self._connector.pull(
            transfer_id,
            kv.source,
            blocks,
            num_shared,
            timeout_s,
            hash_prompt(sequence.request.submit.prompt_ids),
            fill_s,
        )

    def abandon_pull(self, request: Request) -> None:
        """Nobody waits for the KV any more, held or pulling; blocks come back when the plane says so."""
        transfer_id = _pulled(request).transfer_id
        self._held.discard(transfer_id)
        if transfer_id in self._pulls:
            self._pulls[transfer_id].sequence = None
        self._connector.cancel(transfer_id)

    def pull_done(self, transfer_id: str) -> Sequence | None:
        """The KV is proven: give the blocks to the sequence that waits, if it still does."""
        pull = self._pulls.pop(transfer_id, None)
        if pull is None:
            return None
        if pull.sequence is None:
            self._allocator.release([*pull.shared, *pull.destination])
            return None
        pull.sequence.blocks = [*pull.shared, *pull.destination]
        return pull.sequence

    def pull_failed(self, transfer_id: str, *, quiescent: bool) -> Sequence | None:
        """Take the blocks back, through quarantine when a write may still come; returns who waited."""
        pull = self._pulls.pop(transfer_id, None)
        if pull is None:
            return None
        self._allocator.release(pull.shared)
        if quiescent:
            self._allocator.release(pull.destination)
        else:
            self._allocator.quarantine(pull.destination)
            self._quarantine[transfer_id] = pull.destination
        return pull.sequence

    def pull_quiescent(self, transfer_id: str) -> None:
        """No write can come any more."""
        self._allocator.end_quarantine(self._quarantine.pop(transfer_id, []))

    def holders(self) -> Iterator[list[int]]:
        """Every reference that the ledger holds, for the allocator's audit."""
        for lease in self._leases.values():
            yield lease.blocks
        for pull in self._pulls.values():
            yield pull.shared
            yield pull.destination


def to_wire(tokens: Seq[Token], cached_tokens: int) -> FirstTokens:
    """Token 1 of every choice, in order of their index, as the plane carries it to a streamed pull."""
    return FirstTokens(choices=tuple(_token_to_wire(token) for token in tokens), cached_tokens=cached_tokens)


def from_wire(first: FirstTokens, sampling: SamplingParams, vocab_size: int) -> tuple[Token, ...] | None:
    """The tokens as if they had been sampled here.

    None if they cannot be this request's: another number of choices, unknown ids, or no choice that goes on,
    for which a prefill pins nothing.
    """
    if len(first.choices) != sampling.n or any(token.id >= vocab_size for token in first.choices):
        return None
    if sampling.max_tokens == 1 or all(token.finish for token in first.choices):
        return None
    return tuple(_token_from_wire(index, token) for index, token in enumerate(first.choices))


def _token_to_wire(token: Token) -> FirstToken:
    if token.logprob is None:
        return FirstToken(id=token.token_id, finish=token.finish)
    return FirstToken(
        id=token.token_id,
        finish=token.finish,
        logprob=token.logprob.logprob,
        margin=token.logprob.margin,
        top=token.logprob.top,
    )


def _token_from_wire(index: int, token: FirstToken) -> Token:
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
