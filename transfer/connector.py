# SPDX-License-Identifier: Apache-2.0
"""The transfer plane's interface for an engine's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from kvferry.transfer.consumer.consumer import Consumer
from kvferry.transfer.events import LeaseEnded, PlaneEvent, PlaneStats
from kvferry.transfer.ids import TransferId
from kvferry.transfer.plane import BlockRun, PlaneConfig, RemotePrompt
from kvferry.transfer.producer.producer import Producer
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.sampled_tokens import SampledTokens


class SchedulerConnector:
    """Leases our prompts' blocks to readers, and pulls other agents' blocks into ours.

    Lives on the engine process's event loop. Only `start` and `close` wait; every other method commits and
    returns. `wake` is called whenever `take_events` would return something.
    """

    def __init__(self, config: PlaneConfig, wake: Callable[[], None]) -> None:
        self._config = config
        self._wake = wake
        self._events: list[PlaneEvent] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._ranks = RankGroup(config.rank_addresses)
        self._producer = Producer(config, self._ranks, self._emit)
        self._consumer = Consumer(config, self._ranks, self._emit)
        self.control_port = config.control_port

    async def start(self, timeout_s: float) -> None:
        """Connect to the ranks, wait until every one has reported, and bind the control channel.

        Raises TimeoutError naming the ranks that have not, OSError if one does not listen or the control
        channel cannot be bound, and RuntimeError if no backend is open on every rank.
        """
        self._context = zmq.Context()
        await self._ranks.start(timeout_s, self._consumer)
        if not self._ranks.transfers:
            raise RuntimeError("no transfer backend is open on every rank")
        self.control_port = self._producer.start(self._context)
        self._consumer.start(self._context)

    async def close(self) -> None:
        """Close every socket and timer. Idempotent; no event follows."""
        self._consumer.close()
        self._producer.close()
        self._ranks.close()
        if self._context is not None:
            self._context.term()
            self._context = None

    @property
    def transfers(self) -> tuple[str, ...]:
        """Backends usable on every rank, best first."""
        return self._ranks.transfers

    # Producer.

    def register(
        self, transfer_id: str, runs: Sequence[BlockRun], num_tokens: int, ids_hash: str, timeout_s: float
    ) -> None:
        """Begin a lease over a prompt's blocks, a run for each group, before they are computed.

        It ends after `timeout_s` at the latest. Raises `DuplicateTransfer`. `ids_hash` is sent to the reader.
        If the transfer has been dropped already, `LeaseEnded` follows at once.
        """
        self._producer.register(TransferId(transfer_id), runs, num_tokens, ids_hash, timeout_s)

    def grant_prefix(
        self, transfer_id: str, block_ids: Sequence[int], num_tokens: int, ids_hash: str
    ) -> bool:
        """Answer `LoanRequested` with a lease over blocks that are computed on every rank, or with no blocks.

        True if there is a lease: the blocks are pinned from now on, and `LeaseEnded` follows. `ids_hash` and
        `num_tokens` are sent to the reader.
        """
        return self._producer.grant_prefix(TransferId(transfer_id), block_ids, num_tokens, ids_hash)

    def advance(self, transfer_id: str, readable_blocks: int) -> None:
        """Make the first blocks of an engine with one group readable: every rank has computed them, device
        work included.
        """
        self._producer.advance(TransferId(transfer_id), readable_blocks)

    def ready(self, transfer_id: str, first_tokens: SampledTokens | None = None) -> None:
        """Make the whole prompt readable, and start the lease clock.

        `first_tokens` are sent to the reader, whose request may have come before there were any.
        """
        self._producer.ready(TransferId(transfer_id), first_tokens)

    def withdraw(self, transfer_id: str) -> None:
        """End a lease whose request has ended before it was ready: nothing is left to decode.

        From the return on no release is valid, the blocks are the caller's, and no `LeaseEnded` follows, not
        even one that is queued already.
        """
        self._producer.withdraw(TransferId(transfer_id))
        self._events = [
            event
            for event in self._events
            if not (isinstance(event, LeaseEnded) and event.transfer_id == transfer_id)
        ]

    def drop(self, transfer_id: str) -> bool:
        """End a lease that no reader needs. True if this ended one, and then `LeaseEnded` follows."""
        return self._producer.drop(TransferId(transfer_id))

    # Consumer.

    def hold(self, transfer_id: str, remote: RemotePrompt, timeout_s: float) -> None:
        """Keep the producer's lease alive for a request that has no room yet. Raises `DuplicateTransfer`.

        After `timeout_s` the hold ends by itself, without an event.
        """
        self._consumer.hold(TransferId(transfer_id), remote, timeout_s)

    def pull(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        runs: Sequence[BlockRun],
        timeout_s: float,
        ids_hash: str | None = None,
        fill_s: float = 0.0,
    ) -> None:
        """Read the blocks at the end of a prompt that are missing here, group by group, into `runs`.

        Comes to exactly one `PullDone` or `PullFailed`; until then, and after a failure that is not quiescent
        until `PullQuiescent`, the blocks belong to the transfer. Raises `DuplicateTransfer`. With `ids_hash`
        the producer's must be equal. Where the producer does not lease all of them it fails (`mismatch`).

        Blocks are read as soon as they are computed. All must be here `timeout_s` after the prompt is ready,
        and that may take the producer `fill_s` from now.
        """
        self._consumer.pull(TransferId(transfer_id), remote, runs, timeout_s, ids_hash, fill_s)

    def pull_prefix(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        timeout_s: float,
    ) -> None:
        """Ask a peer for the blocks of its prefix cache that have these hashes, and read them into ours.

        Both are of consecutive blocks of a prompt. Ends like a pull, with the same proof: `PullDone` says how
        many of the first blocks are here. Raises `DuplicateTransfer`.
        """
        self._consumer.pull_prefix(TransferId(transfer_id), remote, block_ids, hashes, timeout_s)

    def ask_prefix(
        self, transfer_id: str, remote: RemotePrompt, hashes: Sequence[bytes], timeout_s: float
    ) -> None:
        """Ask a peer for a lease over the blocks of its prefix cache that have these hashes.

        Comes to `PrefixLent`, or to a `PullFailed` after `timeout_s` at the latest. What is lent is held for
        so long, for a `pull` of that many blocks; then it ends without an event. Raises `DuplicateTransfer`.
        """
        self._consumer.ask_prefix(TransferId(transfer_id), remote, hashes, timeout_s)

    def cancel(self, transfer_id: str) -> None:
        """Cancel a pull or a hold, and let the producer free its blocks.

        A pull still ends in `PullFailed`; a mere hold just ends. Unknown transfers are ignored.
        """
        self._consumer.cancel(TransferId(transfer_id))

    # Both.

    def take_events(self) -> list[PlaneEvent]:
        """Return and clear the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stats(self) -> PlaneStats:
        """Counters since start."""
        producer, consumer = self._producer, self._consumer
        return PlaneStats(
            leased=producer.leased,
            quarantined=consumer.quarantined,
            leases_ended=dict(producer.ended),
            pulls=consumer.pulls,
            streamed_pulls=consumer.streamed_pulls,
            pull_bytes=consumer.nbytes,
            pull_descriptors=consumer.descriptors,
            pull_times={backend: times.copy() for backend, times in consumer.times.items()},
            pull_failures=dict(consumer.failures),
            verify_seconds=consumer.verify_seconds,
            handshakes=producer.handshakes + consumer.handshakes,
            bad_frames=producer.bad_frames,
            refusals=consumer.refusals,
            prefix_loans=producer.loans,
            prefix_pulls=consumer.prefix_pulls,
            prefix_pull_bytes=consumer.prefix_pull_bytes,
            prefix_pull_failures=dict(consumer.prefix_pull_failures),
            rebuilds=consumer.rebuilds,
        )

    def check_integrity(self) -> None:
        """Recount everything. Raises AssertionError on an inconsistency."""
        self._producer.check_integrity()
        self._consumer.check_integrity()
        self._ranks.check_integrity()

    def _emit(self, event: PlaneEvent) -> None:
        self._events.append(event)
        self._wake()
