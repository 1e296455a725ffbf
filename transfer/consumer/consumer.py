# SPDX-License-Identifier: Apache-2.0
"""The consumer's half of an engine's transfer plane: pulls, driven by links, rank reports and timers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import zmq

from kvferry.transfer.checksum import SumTable, first_mismatch, split_rows
from kvferry.transfer.consumer.link import Link, LinkState, Source, source_of
from kvferry.transfer.consumer.pull import CancelRead as CancelReadEffect
from kvferry.transfer.consumer.pull import (
    Connect,
    Effect,
    Emit,
    Pull,
    PullState,
    Read,
    SendDrop,
    SendOpen,
    SendRelease,
    Verify,
)
from kvferry.transfer.consumer.quarantine import Quarantine, RebuildScheduler
from kvferry.transfer.control import messages as wire
from kvferry.transfer.events import PullDone, PullFailed, PullQuiescent
from kvferry.transfer.ids import TransferId
from kvferry.transfer.layout import num_columns, plan_spans, source_columns
from kvferry.transfer.plane import PlaneConfig, Remote
from kvferry.transfer.producer.lease import DuplicateTransfer, Grant
from kvferry.transfer.ranks.aggregate import Outcome
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.ranks.messages import CancelRead, Rebuild, pack_spans
from kvferry.transfer.ranks.messages import Read as ReadCommand

_OPEN_WAIT_S = 1.0
MAX_REFUSALS = 64
"""Producers remembered that we do not fit."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0
"""Before asking a producer again that did not let us wait: its map of early readers is full."""
_REBUILD_CHECK_S = 0.25
"""How often to check whether a backend that is to be rebuilt has become idle."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """One pull or hold. `deadline` is when it is given up (`time.monotonic`), and `timer` does it.

    `move_s` is how long after the producer's `ready` that may be, at most, and how long one read may take.
    `patient_until`: a producer that answers the `open` with nothing earlier did not let us wait; `pause` then
    delays the next one.
    """

    pull: Pull
    remote: Remote
    link: Link | None
    deadline: float
    move_s: float
    timer: asyncio.TimerHandle
    patient_until: float = 0.0
    pause_s: float = 0.0
    pause: asyncio.TimerHandle | None = None

    def stop_timers(self) -> None:
        self.timer.cancel()
        if self.pause is not None:
            self.pause.cancel()


class Consumer:
    """Pulls prompts' blocks from producers. Every method returns at once."""

    def __init__(
        self,
        config: PlaneConfig,
        ranks: RankGroup,
        emit: Callable[[PullDone | PullFailed | PullQuiescent], None],
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._emit = emit
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._entries: dict[TransferId, _Entry] = {}
        self._links: dict[Source, Link] = {}
        """Usable links. A retired link lives on in its entries only."""
        self._refusals: OrderedDict[Source, str] = OrderedDict()
        """Why some producers are never to be asked again."""
        self._numbers = itertools.count(1)
        self._by_number: dict[int, Link] = {}
        self._next_seq = 0
        """Where the next pull's reads begin to be numbered: each has one for every block of ours at most."""
        self._renewal: asyncio.TimerHandle | None = None
        self._quarantine = Quarantine(config.quarantine_s, config.num_blocks)
        self._quarantine_timer: asyncio.TimerHandle | None = None
        self._rebuild_requests = RebuildScheduler(config.quarantine_s)
        self._rebuild_timer: asyncio.TimerHandle | None = None
        self.failures: Counter[str] = Counter()
        self.handshakes = 0
        self.rebuilds = 0
        self.pulls = 0
        self.streamed_pulls = 0
        self.nbytes = 0
        self.descriptors = 0
        self.seconds = 0.0
        self.verify_seconds = 0.0

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Begin to take pulls."""
        self._context = context

    def close(self) -> None:
        """Let go of every producer. Pulls end without an event."""
        for entry in self._entries.values():
            entry.stop_timers()
        self._entries.clear()
        for timer in (self._renewal, self._quarantine_timer, self._rebuild_timer):
            if timer is not None:
                timer.cancel()
        for link in list(self._by_number.values()):
            link.close()
        self._by_number.clear()
        self._links.clear()

    @property
    def quarantined(self) -> int:
        """Failed transfers whose destination may still be written to."""
        return len(self._quarantine)

    @property
    def refusals(self) -> dict[str, str]:
        """Why we can never pull from some producers, by incarnation."""
        return {source.engine_id: why for source, why in self._refusals.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError on an inconsistency."""
        for transfer_id, entry in self._entries.items():
            assert not entry.pull.over, f"{transfer_id} is over but kept"
        over = sum(not entry.pull.live for entry in self._entries.values())
        assert over == len(self._quarantine), "quarantined transfers"
        for source, link in self._links.items():
            assert link.state is not LinkState.LOST, f"link to {source} is lost but kept"
        used = {entry.link.number for entry in self._entries.values() if entry.link is not None}
        usable = {link.number for link in self._links.values()}
        assert self._by_number.keys() <= used | usable, "a retired link that nothing uses"
        assert self._ranks.connecting <= len(self._by_number), "ranks connect a link that is closed"

    # The scheduler's calls; see `SchedulerConnector`.

    def hold(self, transfer_id: TransferId, remote: Remote, timeout_s: float) -> None:
        self._check_new(transfer_id)
        entry = self._add(transfer_id, remote, timeout_s)
        entry.link = self._link(remote)
        if entry.link is not None:
            entry.link.renew([transfer_id], self._renewed)
        self._schedule_renewal()

    def pull(
        self,
        transfer_id: TransferId,
        remote: Remote,
        block_ids: Sequence[int],
        first_block: int,
        timeout_s: float,
        ids_hash: str | None,
        fill_s: float,
    ) -> None:
        entry = self._entries.get(transfer_id)
        if entry is None or entry.pull.state is not PullState.HELD:
            self._check_new(transfer_id)
            entry = self._add(transfer_id, remote, fill_s + timeout_s)
        else:
            self._set_deadline(entry, fill_s + timeout_s)
        entry.move_s = timeout_s
        self.pulls += 1
        self._schedule_renewal()
        self._perform(entry, entry.pull.start(time.monotonic(), block_ids, first_block, ids_hash))

    def cancel(self, transfer_id: TransferId) -> None:
        entry = self._entries.get(transfer_id)
        if entry is not None:
            self._perform(entry, entry.pull.fail("cancelled"))

    # What the ranks report.

    def link_connected(self, number: int, outcome: Outcome) -> None:
        link = self._by_number.get(number)
        if link is not None:
            link.connected(outcome)

    def engine_broken(self, transfer: str) -> None:
        self._rebuild_requests.request(time.monotonic(), transfer)
        if self._rebuild_timer is None:
            self._rebuild_timer = asyncio.get_running_loop().call_later(
                _REBUILD_CHECK_S, self._rebuild_requested
            )

    def read_ended(self, transfer_id: TransferId, seq: int, outcome: Outcome) -> None:
        entry = self._entries.get(transfer_id)
        if entry is None:
            return
        if not outcome.ok and entry.pull.live and entry.link is not None:
            # Whatever broke the read may have broken the connections between the ranks.
            self._retire(entry.link)
        self._perform(entry, entry.pull.read_ended(seq, outcome))

    def read_quiescent(self, transfer_id: TransferId, seq: int) -> None:
        entry = self._entries.get(transfer_id)
        if entry is not None:
            self._perform(entry, entry.pull.read_quiescent(seq))

    # Links.

    def _link(self, remote: Remote) -> Link | None:
        """The link to a producer, made now if there is none; None if it refused us for good."""
        source = source_of(remote)
        link = self._links.get(source)
        if link is not None or source in self._refusals:
            return link
        if self._context is None:
            raise AssertionError("not started")
        number = next(self._numbers)
        link = Link(
            number,
            source,
            self._config,
            self._ranks,
            on_ready=self._link_ready,
            on_lost=self._link_lost,
        )
        link.start(self._context)
        self._links[source] = link
        self._by_number[number] = link
        return link

    def _link_ready(self, link: Link) -> None:
        self.handshakes += 1
        for other in list(self._links.values()):
            if other.source.address == link.source.address and other is not link:
                other.lose("incarnation", f"{link.source} is there now")
        for entry in self._users(link):
            self._perform(entry, entry.pull.connected(link.transfer))

    def _link_lost(self, link: Link, reason: str, detail: str) -> None:
        self._forget(link)
        if link.refusal:
            self._refusals[link.source] = link.refusal
            while len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)
        for entry in self._users(link):
            entry.link = None
            if (
                entry.pull.state is not PullState.HELD
            ):  # a hold meets the producer anew when it becomes a pull
                self._perform(entry, entry.pull.lost(reason, detail))

    def _retire(self, link: Link) -> None:
        """Use the link for no further transfer."""
        if self._links.get(link.source) is link:
            del self._links[link.source]

    def _forget(self, link: Link) -> None:
        self._retire(link)
        self._by_number.pop(link.number, None)

    def _users(self, link: Link) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.link is link]

    # One transfer.

    def _check_new(self, transfer_id: TransferId) -> None:
        if transfer_id in self._entries:
            raise DuplicateTransfer(transfer_id)

    def _add(self, transfer_id: TransferId, remote: Remote, timeout_s: float) -> _Entry:
        timer = asyncio.get_running_loop().call_later(timeout_s, self._over_time, transfer_id)
        pull = Pull(transfer_id, remote.num_tokens, verify=self._config.verify_kv, first_seq=self._next_seq)
        self._next_seq += self._config.num_blocks
        entry = _Entry(pull, remote, None, time.monotonic() + timeout_s, timeout_s, timer)
        self._entries[transfer_id] = entry
        return entry

    def _set_deadline(self, entry: _Entry, timeout_s: float) -> None:
        entry.timer.cancel()
        entry.deadline = time.monotonic() + timeout_s
        entry.timer = asyncio.get_running_loop().call_later(
            timeout_s, self._over_time, entry.pull.transfer_id
        )

    def _over_time(self, transfer_id: TransferId) -> None:
        entry = self._entries.get(transfer_id)
        if entry is None:
            return
        if entry.pull.reading and entry.link is not None:
            self._retire(entry.link)  # its ranks' connections may be stuck
        self._perform(entry, entry.pull.fail("deadline"))

    def _perform(self, entry: _Entry, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Connect():
                    self._connect(entry)
                case SendOpen():
                    self._open(entry, effect)
                case Read():
                    self._read(entry, effect)
                case CancelReadEffect():
                    self._ranks.broadcast(CancelRead(transfer_id=entry.pull.transfer_id, seq=effect.seq))
                case Verify():
                    self._verify(entry, effect)
                case SendRelease():
                    self._release(entry, effect)
                case SendDrop():
                    if entry.link is not None:
                        entry.link.drop(entry.pull.transfer_id)
                case Emit():
                    self._tell(entry, effect)
        if entry.pull.over:
            self._remove(entry)

    def _connect(self, entry: _Entry) -> None:
        self._relink(entry)
        if entry.link is None:
            self._perform(entry, entry.pull.lost("refused", self._refusals[source_of(entry.remote)]))
        elif entry.link.state is LinkState.READY:
            self._perform(entry, entry.pull.connected(entry.link.transfer))

    def _relink(self, entry: _Entry) -> None:
        """Have it use the link that its producer has now: its own may have been retired or lost."""
        if entry.link is not None and self._links.get(entry.link.source) is not entry.link:
            self._leave(entry)
        if entry.link is None:
            entry.link = self._link(entry.remote)

    def _open(self, entry: _Entry, effect: SendOpen) -> None:
        if entry.link is None:
            return
        now = time.monotonic()
        wait_s = min(_OPEN_WAIT_S, max(entry.deadline - now, 0.0))
        entry.patient_until = now + wait_s / 2
        entry.link.open(entry.pull.transfer_id, effect.have, wait_s, partial(self._answered, entry))

    def _pending(self, entry: _Entry) -> None:
        """Nothing new yet: ask again, but not without pause if the producer has no place for us to wait."""
        if time.monotonic() >= entry.patient_until:
            entry.pause_s = 0.0
            self._perform(entry, entry.pull.pending())
        elif entry.pause is None:
            entry.pause_s = min(max(2 * entry.pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
            entry.pause = asyncio.get_running_loop().call_later(entry.pause_s, self._paused, entry)

    def _paused(self, entry: _Entry) -> None:
        entry.pause = None
        self._perform(entry, entry.pull.pending())

    def _release(self, entry: _Entry, effect: SendRelease) -> None:
        if entry.link is not None:
            entry.link.release(entry.pull.transfer_id, effect.read_ok, partial(self._answered, entry))

    def _answered(self, entry: _Entry, answer: wire.Answer | None) -> None:
        """The producer answered a request about this transfer, or did not."""
        pull = entry.pull
        match answer:
            case None:
                effects = pull.unanswered()
                if not pull.live and entry.link is not None:
                    # Nobody said that the connection is broken, but a new one may be answered.
                    self._retire(entry.link)
            case wire.Opened():
                effects = self._opened(entry, answer)
            case wire.Pending():
                self._pending(entry)
                return
            case wire.Gone():
                effects = pull.gone(answer.reason)
            case wire.Released():
                effects = pull.released(time.monotonic(), answer.valid)
            case _:
                effects = pull.fail("refused", f"answered by {type(answer).__name__}")
        self._perform(entry, effects)

    def _opened(self, entry: _Entry, answer: wire.Opened) -> list[Effect]:
        link = entry.link
        if link is None:
            return []
        if answer.block_ids and max(answer.block_ids) >= link.num_blocks:
            return entry.pull.fail("mismatch", f"block {max(answer.block_ids)} of {link.num_blocks}")
        checksums: tuple[bytes, ...] = ()
        if self._config.verify_kv:
            checksums = split_rows(answer.checksums, num_columns(self._config.geometry, link.tp_size))
        grant = Grant(
            ready=answer.state == "ready",
            first_block=answer.first_block,
            block_ids=answer.block_ids,
            num_tokens=answer.num_tokens,
            ids_hash=answer.ids_hash,
            checksums=checksums,
            first_tokens=answer.first_tokens,
        )
        if grant.ready and entry.deadline - time.monotonic() > entry.move_s:
            self._set_deadline(entry, entry.move_s)
        return entry.pull.opened(time.monotonic(), grant)

    def _read(self, entry: _Entry, effect: Read) -> None:
        link = entry.link
        if link is None:
            raise AssertionError(f"{entry.pull!r} reads without a link")
        transfer_id = entry.pull.transfer_id
        commands = []
        for rank in range(self._config.tp_size):
            plan = plan_spans(
                self._config.geometry,
                tp_size=self._config.tp_size,
                rank=rank,
                remote_tp_size=link.tp_size,
                local_blocks=effect.local_blocks,
                remote_blocks=effect.remote_blocks,
            )
            command = ReadCommand(
                link=link.number,
                transfer_id=transfer_id,
                seq=effect.seq,
                spans={remote_rank: pack_spans(table) for remote_rank, table in plan.items()},
                timeout_s=max(min(entry.deadline - time.monotonic(), entry.move_s), 0.0),
            )
            commands.append(command)
        self._ranks.read(transfer_id, effect.seq, commands)

    def _verify(self, entry: _Entry, effect: Verify) -> None:
        if entry.link is None:
            raise AssertionError(f"{entry.pull!r} verifies without a link")
        check = partial(self._summed, entry, effect, entry.link.tp_size, time.monotonic())
        self._ranks.sum_blocks(effect.local_blocks, check)

    def _summed(
        self, entry: _Entry, effect: Verify, remote_tp_size: int, begun: float, sums: SumTable
    ) -> None:
        self.verify_seconds += time.monotonic() - begun
        config = self._config
        found = first_mismatch(
            sums,
            effect.checksums,
            effect.local_blocks,
            source_columns(config.geometry, tp_size=config.tp_size, remote_tp_size=remote_tp_size),
        )
        self._perform(entry, entry.pull.verified(found))

    def _tell(self, entry: _Entry, effect: Emit) -> None:
        event = effect.event
        if isinstance(event, PullDone):
            self.nbytes += event.nbytes
            self.descriptors += event.descriptors
            self.seconds += event.pull_s
            self.streamed_pulls += event.early_blocks > 0
        elif isinstance(event, PullFailed):
            self.failures[event.reason] += 1
            _log.warning("pull %s failed: %s %s", event.transfer_id, event.reason, event.detail)
        entry.timer.cancel()
        self._emit(event)
        self._watch_quarantine(entry, event)

    def _remove(self, entry: _Entry) -> None:
        entry.stop_timers()
        if self._entries.get(entry.pull.transfer_id) is not entry:
            return
        del self._entries[entry.pull.transfer_id]
        self._leave(entry)

    def _leave(self, entry: _Entry) -> None:
        """The transfer needs its link no more; a retired one is closed by its last."""
        link, entry.link = entry.link, None
        if link is not None and self._links.get(link.source) is not link and not self._users(link):
            self._by_number.pop(link.number, None)
            link.close()

    # Quarantine.

    def _watch_quarantine(self, entry: _Entry, event: PullDone | PullFailed | PullQuiescent) -> None:
        pull = entry.pull
        if isinstance(event, PullFailed) and not event.quiescent:
            self._quarantine.add(time.monotonic(), pull.transfer_id, pull.backend, pull.num_written)
        elif isinstance(event, PullQuiescent):
            self._quarantine.remove(pull.transfer_id)
        else:
            return
        self._arm_quarantine()

    def _arm_quarantine(self) -> None:
        if self._quarantine_timer is not None:
            self._quarantine_timer.cancel()
            self._quarantine_timer = None
        # Ordered from the loop, never from within a transfer's own events: a rebuild ends other transfers.
        delay = self._quarantine.delay(time.monotonic())
        if delay is not None:
            loop = asyncio.get_running_loop()
            self._quarantine_timer = loop.call_later(delay, self._rebuild_due)

    def _rebuild_due(self) -> None:
        self._quarantine_timer = None
        for transfer in self._quarantine.pop_due(time.monotonic()):
            self._rebuild(transfer, "a quarantine is too old or too large")
        self._arm_quarantine()

    def _rebuild_requested(self) -> None:
        self._rebuild_timer = None
        reading = {entry.pull.backend for entry in self._entries.values() if entry.pull.reading}
        for transfer in self._rebuild_requests.pop_due(time.monotonic(), reading):
            self._rebuild(transfer, "it can reach some peer no more")
        if self._rebuild_requests:
            self._rebuild_timer = asyncio.get_running_loop().call_later(
                _REBUILD_CHECK_S, self._rebuild_requested
            )

    def _rebuild(self, transfer: str, why: str) -> None:
        _log.warning("rebuilding the %s engines: %s", transfer, why)
        self.rebuilds += 1
        for link in list(self._by_number.values()):
            if link.transfer == transfer:
                link.lose("unreachable", f"our {transfer} engines are being rebuilt")
        self._ranks.broadcast(Rebuild(transfer=transfer))

    # Renewals.

    def _schedule_renewal(self) -> None:
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_later(
                self._config.renewal_interval_s, self._renew
            )

    def _renew(self) -> None:
        """Renew everything that is still wanted, one request per producer."""
        self._renewal = None
        wanted: dict[int, list[str]] = {}
        for transfer_id, entry in self._entries.items():
            if entry.pull.live:
                if entry.pull.state is PullState.HELD:
                    self._relink(entry)
                if entry.link is not None:
                    wanted.setdefault(entry.link.number, []).append(transfer_id)
        for number, transfer_ids in wanted.items():
            self._by_number[number].renew(transfer_ids, self._renewed)
        if self._entries:
            self._schedule_renewal()

    def _renewed(self, answer: wire.Answer | None) -> None:
        if not isinstance(answer, wire.Renewed):
            return  # the next renewal is not far, and `release` decides in the end
        for transfer_id in wire.transfer_ids(answer.gone):
            entry = self._entries.get(transfer_id)
            if entry is not None:
                self._perform(entry, entry.pull.gone("gone"))
