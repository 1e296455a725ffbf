# SPDX-License-Identifier: Apache-2.0
"""The consumer's half of an engine's transfer plane: pulls, driven by responses, rank reports and timers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq

from kvferry.transfer.consumer.link import Link, LinkState, source_of
from kvferry.transfer.consumer.link_pool import LinkPool
from kvferry.transfer.consumer.pull import (
    ClearBlocks,
    Effect,
    Emit,
    EnsureLink,
    Pull,
    PullState,
    ReadBlocks,
    SendDrop,
    SendLend,
    SendOpen,
    SendRelease,
    Verify,
)
from kvferry.transfer.consumer.rebuild import Rebuilder
from kvferry.transfer.control import messages as wire
from kvferry.transfer.events import NO_FAULT, PrefixLent, PullDone, PullFailed, PullQuiescent, PullTimes
from kvferry.transfer.ids import DuplicateTransfer, TransferId
from kvferry.transfer.plane import RENEWALS, BlockRun, PlaneConfig, RemotePrompt, is_sampled
from kvferry.transfer.ranks.aggregate import Outcome
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.ranks.messages import CancelRead

_OPEN_WAIT_S = 1.0
_LEAST_RENEWAL_S = 0.1
"""Whatever a producer says of its leases."""
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.02, 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenBackoff:
    """Delays the next `open` to a producer that did not wait: its map of early readers is full."""

    expected_at: float = 0.0
    """A response without blocks before this time counts as one that did not wait."""
    delay_s: float = 0.0

    def next_delay(self, now: float) -> float:
        """Return the seconds to wait before the next `open`."""
        if now >= self.expected_at:
            self.delay_s = 0.0
        else:
            self.delay_s = min(max(2 * self.delay_s, _MIN_BACKOFF_S), _MAX_BACKOFF_S)
        return self.delay_s


@dataclass(slots=True)
class _PullEntry:
    """One pull or hold. At `deadline` (`time.monotonic`) `timer` fails it.

    `move_s` limits one read, and the time from the producer's `ready` to the end.
    """

    pull: Pull
    remote: RemotePrompt
    link: Link | None
    deadline: float
    move_s: float
    timer: asyncio.TimerHandle
    of_prefix: bool = False
    """It is of the peer's prefix cache, and counted apart."""
    backoff: _OpenBackoff = field(default_factory=_OpenBackoff)
    backoff_timer: asyncio.TimerHandle | None = None

    def stop_timers(self) -> None:
        self.timer.cancel()
        if self.backoff_timer is not None:
            self.backoff_timer.cancel()


class Consumer:
    """Pulls prompts' blocks from producers. Every method returns at once.

    `hold`, `pull` and `cancel` are documented at `SchedulerConnector`; the ranks' reports come as
    `RankEvents`.
    """

    def __init__(
        self,
        config: PlaneConfig,
        ranks: RankGroup,
        emit: Callable[[PrefixLent | PullDone | PullFailed | PullQuiescent], None],
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._emit = emit
        self._entries: dict[TransferId, _PullEntry] = {}
        self._links = LinkPool(config, ranks, on_ready=self._link_ready, on_lost=self._link_lost)
        self._rebuilder = Rebuilder(config, ranks, self._links, self._reading)
        self._next_seq = 0
        """The next pull numbers its reads from here on: it has at most one for each of our blocks."""
        self._renewal: asyncio.TimerHandle | None = None
        self._renewal_interval_s = config.renewal_interval_s
        """Less than configured once a producer has granted a lease that is too short for that."""
        self.failures: Counter[str] = Counter()
        self.handshakes = 0
        self.pulls = 0
        self.prefix_pulls = 0
        self.prefix_pull_bytes = 0
        self.prefix_pull_failures: Counter[str] = Counter()
        self.streamed_pulls = 0
        self.nbytes = 0
        self.descriptors = 0
        self.times: dict[str, PullTimes] = {}
        """By backend."""
        self.verify_seconds = 0.0

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._links.start(context)

    def close(self) -> None:
        """Close every link and timer. Pulls end without an event."""
        for entry in self._entries.values():
            entry.stop_timers()
        self._entries.clear()
        if self._renewal is not None:
            self._renewal.cancel()
        self._rebuilder.close()
        self._links.close()

    @property
    def quarantined(self) -> int:
        """Failed transfers whose destination may still be written to."""
        return self._rebuilder.quarantined

    @property
    def rebuilds(self) -> int:
        return self._rebuilder.rebuilds

    @property
    def refusals(self) -> dict[str, str]:
        """Why some producers can never be used, by incarnation."""
        return self._links.refusals

    def check_integrity(self) -> None:
        """Raises AssertionError on an inconsistency."""
        for transfer_id, entry in self._entries.items():
            assert not entry.pull.over, f"{transfer_id} is over but kept"
        over = sum(not entry.pull.live for entry in self._entries.values())
        assert over == self.quarantined, "quarantined transfers"
        links = (entry.link for entry in self._entries.values())
        self._links.check_integrity({link.number for link in links if link is not None})

    # The scheduler's calls.

    def hold(self, transfer_id: TransferId, remote: RemotePrompt, timeout_s: float) -> None:
        entry = self._add(transfer_id, remote, timeout_s)
        entry.link = self._links.acquire(remote)
        if entry.link is not None:
            entry.link.renew([transfer_id], self._renewed)
        self._schedule_renewal()

    def pull(
        self,
        transfer_id: TransferId,
        remote: RemotePrompt,
        runs: Sequence[BlockRun],
        timeout_s: float,
        ids_hash: str | None,
        fill_s: float,
    ) -> None:
        entry = self._entries.get(transfer_id)
        if entry is None or entry.pull.state is not PullState.HELD:
            entry = self._add(transfer_id, remote, fill_s + timeout_s)
        else:
            self._set_deadline(entry, fill_s + timeout_s)
        entry.move_s = timeout_s
        self._schedule_renewal()
        self._perform(entry, entry.pull.start(time.monotonic(), runs, ids_hash))

    def pull_prefix(
        self,
        transfer_id: TransferId,
        remote: RemotePrompt,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        timeout_s: float,
    ) -> None:
        entry = self._add(transfer_id, remote, timeout_s)
        entry.of_prefix = True
        self.prefix_pulls += 1
        self._schedule_renewal()
        block_size = self._config.geometry.block_size
        self._perform(entry, entry.pull.start_prefix(time.monotonic(), block_ids, hashes, block_size))

    def ask_prefix(
        self, transfer_id: TransferId, remote: RemotePrompt, hashes: Sequence[bytes], timeout_s: float
    ) -> None:
        entry = self._add(transfer_id, remote, timeout_s)
        entry.of_prefix = True
        self.prefix_pulls += 1
        self._schedule_renewal()
        self._perform(entry, entry.pull.ask_prefix(hashes, self._config.geometry.block_size))

    def cancel(self, transfer_id: TransferId) -> None:
        entry = self._entries.get(transfer_id)
        if entry is not None:
            self._perform(entry, entry.pull.fail("cancelled"))

    # The ranks' reports.

    def link_connected(self, number: int, outcome: Outcome) -> None:
        link = self._links.get(number)
        if link is not None:
            link.connected(outcome)

    def engine_broken(self, transfer: str) -> None:
        self._rebuilder.request(transfer)

    def read_ended(self, transfer_id: TransferId, seq: int, outcome: Outcome) -> None:
        entry = self._entries.get(transfer_id)
        if entry is None:
            return
        if not outcome.ok and entry.pull.live and entry.link is not None:
            self._links.retire(entry.link)  # the connections between the ranks may be broken as well
        self._perform(entry, entry.pull.read_ended(seq, outcome))

    def read_quiescent(self, transfer_id: TransferId, seq: int) -> None:
        entry = self._entries.get(transfer_id)
        if entry is not None:
            self._perform(entry, entry.pull.read_quiescent(seq))

    # Links.

    def _link_ready(self, link: Link) -> None:
        self.handshakes += 1
        for entry in self._users(link):
            self._perform(entry, entry.pull.connected(link.transfer))

    def _link_lost(self, link: Link, reason: str, detail: str) -> None:
        for entry in self._users(link):
            entry.link = None
            if entry.pull.state is not PullState.HELD:  # a hold gets a new link with its next renewal
                self._perform(entry, entry.pull.lost(reason, detail))

    def _users(self, link: Link) -> list[_PullEntry]:
        return [entry for entry in self._entries.values() if entry.link is link]

    def _relink(self, entry: _PullEntry) -> None:
        """Move the transfer to its producer's usable link: its own may be retired or lost."""
        if entry.link is not None and not self._links.is_usable(entry.link):
            self._unlink(entry)
        if entry.link is None:
            entry.link = self._links.acquire(entry.remote)

    def _unlink(self, entry: _PullEntry) -> None:
        """Take the transfer off its link; a retired link is closed by its last."""
        link, entry.link = entry.link, None
        if link is not None and not self._users(link):
            self._links.close_retired(link)

    # One transfer.

    def _add(self, transfer_id: TransferId, remote: RemotePrompt, timeout_s: float) -> _PullEntry:
        """Raises `DuplicateTransfer`."""
        if transfer_id in self._entries:
            raise DuplicateTransfer(transfer_id)
        timer = asyncio.get_running_loop().call_later(timeout_s, self._timed_out, transfer_id)
        verify = is_sampled(transfer_id, self._config.verify_kv)
        pull = Pull(transfer_id, remote.num_tokens, verify=verify, first_seq=self._next_seq)
        self._next_seq += self._config.num_blocks
        entry = _PullEntry(pull, remote, None, time.monotonic() + timeout_s, timeout_s, timer)
        self._entries[transfer_id] = entry
        return entry

    def _set_deadline(self, entry: _PullEntry, timeout_s: float) -> None:
        entry.timer.cancel()
        entry.deadline = time.monotonic() + timeout_s
        entry.timer = asyncio.get_running_loop().call_later(
            timeout_s, self._timed_out, entry.pull.transfer_id
        )

    def _timed_out(self, transfer_id: TransferId) -> None:
        entry = self._entries.get(transfer_id)
        if entry is None:
            return
        if entry.pull.reading and entry.link is not None:
            self._links.retire(entry.link)  # its ranks' connections may be stuck
        self._perform(entry, entry.pull.fail("deadline"))

    def _perform(self, entry: _PullEntry, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case EnsureLink():
                    self._ensure_link(entry)
                case SendLend():
                    self._lend(entry, effect)
                case SendOpen():
                    self._open(entry, effect)
                case ReadBlocks():
                    self._read(entry, effect)
                case CancelRead():
                    self._ranks.broadcast(effect)
                case Verify():
                    self._verify(entry, effect)
                case ClearBlocks():
                    self._ranks.clear_blocks(effect.local_blocks, partial(self._cleared, entry))
                case SendRelease():
                    self._release(entry, effect)
                case SendDrop():
                    if entry.link is not None:
                        entry.link.drop(entry.pull.transfer_id)
                case Emit():
                    self._report(entry, effect)
        if entry.pull.over:
            self._remove(entry)

    def _ensure_link(self, entry: _PullEntry) -> None:
        self._relink(entry)
        if entry.link is None:
            self._perform(entry, entry.pull.lost("refused", self._links.refusal(entry.remote)))
        elif entry.link.state is LinkState.READY:
            self._perform(entry, entry.pull.connected(entry.link.transfer))

    def _lend(self, entry: _PullEntry, effect: SendLend) -> None:
        if entry.link is None:
            return
        limit_s = max(entry.deadline - time.monotonic(), 0.0)
        entry.link.lend(entry.pull.transfer_id, effect.hashes, limit_s, partial(self._responded, entry))

    def _open(self, entry: _PullEntry, effect: SendOpen) -> None:
        if entry.link is None:
            return
        now = time.monotonic()
        wait_s = min(_OPEN_WAIT_S, max(entry.deadline - now, 0.0))
        entry.backoff.expected_at = now + wait_s / 2
        readers = entry.remote.num_readers
        entry.link.open(entry.pull.transfer_id, effect.have, wait_s, readers, partial(self._responded, entry))

    def _release(self, entry: _PullEntry, effect: SendRelease) -> None:
        if entry.link is not None:
            entry.link.release(entry.pull.transfer_id, effect.read_ok, partial(self._responded, entry))

    def _responded(self, entry: _PullEntry, response: wire.Response | None) -> None:
        """Handle the response to an `open` or a `release`; None: there was none in time."""
        pull = entry.pull
        match response:
            case None:
                effects = pull.unanswered()
                if not pull.live and entry.link is not None:
                    # The connection was not reported broken, but a new one may get a response.
                    self._links.retire(entry.link)
            case wire.Opened():
                effects = self._opened(entry, response)
            case wire.Pending():
                self._pending(entry)
                return
            case wire.Lent():
                effects = pull.lent(time.monotonic(), response.num_blocks)
            case wire.Gone():
                effects = pull.gone(response.reason)
            case wire.Released():
                effects = pull.released(time.monotonic(), response.valid)
            case _:
                effects = pull.fail("refused", f"unexpected response: {type(response).__name__}")
        self._perform(entry, effects)

    def _opened(self, entry: _PullEntry, response: wire.Opened) -> list[Effect]:
        if entry.link is None:
            return []
        try:
            grant = entry.link.grant(response)
        except ValueError as error:
            return entry.pull.fail("mismatch", str(error))
        self._renew_within(response.lease_s)
        if grant.ready and entry.deadline - time.monotonic() > entry.move_s:
            self._set_deadline(entry, entry.move_s)
        return entry.pull.opened(time.monotonic(), grant)

    def _pending(self, entry: _PullEntry) -> None:
        """Open again, after a delay if the producer has no place to wait."""
        if entry.backoff_timer is not None:
            return
        delay_s = entry.backoff.next_delay(time.monotonic())
        if delay_s:
            loop = asyncio.get_running_loop()
            entry.backoff_timer = loop.call_later(delay_s, self._open_again, entry)
        else:
            self._open_again(entry)

    def _open_again(self, entry: _PullEntry) -> None:
        entry.backoff_timer = None
        self._perform(entry, entry.pull.pending())

    def _read(self, entry: _PullEntry, effect: ReadBlocks) -> None:
        if entry.link is None:
            raise RuntimeError(f"{entry.pull!r} reads without a link")
        timeout_s = max(min(entry.deadline - time.monotonic(), entry.move_s), 0.0)
        entry.link.read(entry.pull.transfer_id, effect.seq, effect.groups, timeout_s)

    def _verify(self, entry: _PullEntry, effect: Verify) -> None:
        if entry.link is None:
            raise RuntimeError(f"{entry.pull!r} verifies without a link")
        verified = partial(self._verified, entry, time.monotonic())
        entry.link.verify(effect.local_blocks, effect.checksums, verified)

    def _verified(self, entry: _PullEntry, begun: float, mismatch: str) -> None:
        self.verify_seconds += time.monotonic() - begun
        self._perform(entry, entry.pull.verified(mismatch))

    def _cleared(self, entry: _PullEntry) -> None:
        self._perform(entry, entry.pull.cleared())

    def _report(self, entry: _PullEntry, effect: Emit) -> None:
        """Pass an event to the scheduler, and count the end of a pull."""
        event = effect.event
        if isinstance(event, PrefixLent):
            self._emit(event)
            return
        if isinstance(event, PullDone) and entry.of_prefix:
            self.prefix_pull_bytes += event.nbytes
        elif isinstance(event, PullDone):
            self.pulls += 1
            self.nbytes += event.nbytes
            self.descriptors += event.descriptors
            self.times.setdefault(event.backend, PullTimes()).add(event.pull_s)
            self.streamed_pulls += event.early_blocks > 0
        elif isinstance(event, PullFailed) and event.reason not in NO_FAULT:
            failures = self.prefix_pull_failures if entry.of_prefix else self.failures
            failures[event.reason] += 1
            source = source_of(entry.remote)
            _log.warning(
                "pull %s from %s failed: %s %s", event.transfer_id, source, event.reason, event.detail
            )
        entry.timer.cancel()
        self._emit(event)
        if isinstance(event, PullFailed) and not event.quiescent:
            self._rebuilder.quarantine(entry.pull)
        elif isinstance(event, PullQuiescent):
            self._rebuilder.quiescent(entry.pull.transfer_id)

    def _remove(self, entry: _PullEntry) -> None:
        entry.stop_timers()
        if self._entries.get(entry.pull.transfer_id) is not entry:
            return
        del self._entries[entry.pull.transfer_id]
        self._unlink(entry)

    def _reading(self) -> set[str]:
        """The backends over which something is being read."""
        return {entry.pull.backend for entry in self._entries.values() if entry.pull.reading}

    # Renewals.

    def _schedule_renewal(self) -> None:
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_later(self._renewal_interval_s, self._renew)

    def _renew_within(self, lease_s: float) -> None:
        """Renew often enough for leases of so many seconds, from now on."""
        interval_s = max(_LEAST_RENEWAL_S, lease_s / RENEWALS)
        if interval_s >= self._renewal_interval_s:
            return
        self._renewal_interval_s = interval_s
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        self._schedule_renewal()

    def _renew(self) -> None:
        """Renew every live transfer's lease, with one request per producer."""
        self._renewal = None
        live: dict[Link, list[str]] = {}
        for transfer_id, entry in self._entries.items():
            if entry.pull.live:
                if entry.pull.state is PullState.HELD:
                    self._relink(entry)
                if entry.link is not None:
                    live.setdefault(entry.link, []).append(transfer_id)
        for link, transfer_ids in live.items():
            link.renew(transfer_ids, self._renewed)
        if self._entries:
            self._schedule_renewal()

    def _renewed(self, response: wire.Response | None) -> None:
        if not isinstance(response, wire.Renewed):
            return  # the next renewal is not far, and `release` decides in the end
        for transfer_id in wire.transfer_ids(response.gone):
            entry = self._entries.get(transfer_id)
            if entry is not None:
                self._perform(entry, entry.pull.gone("gone"))
