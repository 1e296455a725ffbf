# SPDX-License-Identifier: Apache-2.0
"""Which prompts a rank lends and which it fetches, each under the room in which SGLang's two servers meet.

SGLang's scheduler asks again and again how far each is (`poll`), and then frees pages or computes on them. So
a prompt is computed on only after the producer's proof (I1), a lease is over before the pages under it are
free (I1), and a fetch has failed only when nothing else writes to its pages (I3).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.agent.announce.work_counts import WorkCounts
from kvferry.agent.plugin.plane_thread import LeaseRefused, PlaneThread
from kvferry.transfer.events import NO_FAULT, LeaseEnded, PullDone, PullFailed, PullQuiescent
from kvferry.transfer.plane import BlockRun, RemotePrompt
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens

_STALE = frozenset({"unreachable", "refused", "incarnation"})
_DUPLICATE = "the room is in use, or was used before"
_WITHDRAWN = "withdrawn"

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Loan:
    """A prompt whose pages are leased. `is_over`: they may be freed; `failure`: why they were not read."""

    transfer_id: str
    num_pages: int
    is_over: bool = False
    failure: str = ""

    @property
    def was_lent(self) -> bool:
        """Whether the pages were lent, and not withdrawn. No failure of the request is this rank's then."""
        return self.failure not in (_DUPLICATE, _WITHDRAWN)


@dataclass(frozen=True, slots=True)
class ProducerRank:
    """One rank of the producer that leases its share of a prompt. `is_read`: there is something to read
    there; else its lease only has to end well, for another rank has the same.
    """

    rank: int
    prompt: RemotePrompt
    is_read: bool = True


@dataclass(eq=False, slots=True)
class Fetch:
    """A prompt that is, or will be, fetched.

    `reading`: the pulls, by transfer id, that may write to its pages. `is_over`: none does, and the prompt is
    proven right by all of its sources, with the producer's metadata in `row`, unless there is a `failure`.
    `is_stale`: the producer is not where it was, or another.
    """

    room: int
    sources: tuple[ProducerRank, ...]
    reading: set[str] = field(default_factory=set)
    is_over: bool = False
    failure: str = ""
    is_stale: bool = False
    row: bytes = b""
    held_until: float = math.inf
    """By the clock; while there are no pages for it."""

    @property
    def prompts(self) -> dict[str, RemotePrompt]:
        """By transfer id."""
        return {_transfer_id(self.room, each.rank): each.prompt for each in self.sources}


def _transfer_id(room: int, rank: int) -> str:
    """Of what a rank of the producer leases."""
    return f"{room}.{rank}"


class Rooms:
    """Called by one thread; only `withdraw` waits.

    Args:
        rank: This rank's number, by which readers know what it leases.
        lease_limit_s: When a lease ends however often it is renewed.
        pull_timeout_s: Deadline of a pull, from when the prompt is computed.
        fill_s: How long the producer may take to compute a prompt.
        hold_timeout_s: How long a lease is renewed for a prompt that waits for pages.
    """

    def __init__(
        self,
        plane: PlaneThread,
        *,
        rank: int,
        lease_limit_s: float,
        pull_timeout_s: float,
        fill_s: float,
        hold_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = plane
        self._rank = rank
        self._lease_limit_s = lease_limit_s
        self._pull_timeout_s = pull_timeout_s
        self._fill_s = fill_s
        self._hold_timeout_s = hold_timeout_s
        self._clock = clock
        self._loans: dict[str, Loan] = {}
        """By transfer id, until they are over."""
        self._fetches: dict[int, Fetch] = {}
        """By room, until they are given up and nothing writes any more."""
        self.counts = WorkCounts()
        self.leased_pages = 0
        self.leases_expired = 0
        self.polls = 0

    # Prompts that are lent.

    def lend(
        self, room: int, pages: Sequence[int], num_tokens: int, ids_hash: str, row: bytes, token: int
    ) -> Loan:
        """Lease a prompt's pages, which are computed. `row` and `token` are for the reader."""
        loan = Loan(_transfer_id(room, self._rank), len(pages))
        if loan.transfer_id in self._loans:
            loan.is_over, loan.failure = True, _DUPLICATE
            return loan
        self._loans[loan.transfer_id] = loan
        self.leased_pages += loan.num_pages
        first = SampledTokens(choices=(SampledToken(id=token),), row=row)
        runs = (BlockRun(0, tuple(pages)),)
        self._plane.register_lease(loan.transfer_id, runs, num_tokens, ids_hash, self._lease_limit_s, first)
        return loan

    def withdraw(self, loan: Loan) -> None:
        """End a lease: from the return on no reader is told that what it read is right. Idempotent."""
        if not loan.is_over:
            self._plane.withdraw(loan.transfer_id)
            self._end_loan(loan, _WITHDRAWN)

    # Prompts that are fetched.

    def hold(self, room: int, sources: Sequence[ProducerRank]) -> Fetch:
        """Keep a prompt's leases, once there are any, until there are pages to fetch it into."""
        fetch = Fetch(room, tuple(sources), held_until=self._clock() + self._hold_timeout_s)
        if room in self._fetches:
            fetch.is_over, fetch.failure = True, _DUPLICATE
            return fetch
        self._fetches[room] = fetch
        for transfer_id, prompt in fetch.prompts.items():
            self._plane.hold(transfer_id, prompt, self._hold_timeout_s)
        return fetch

    def fetch(self, fetch: Fetch, first: int, pages: Sequence[int], ids_hash: str) -> None:
        """Begin to read a prompt's pages from position `first` on."""
        if fetch.is_over:
            return
        for source in fetch.sources:
            transfer_id = _transfer_id(fetch.room, source.rank)
            fetch.reading.add(transfer_id)
            run = BlockRun(first, tuple(pages)) if source.is_read else BlockRun(first + len(pages), ())
            self._plane.pull(transfer_id, source.prompt, (run,), self._pull_timeout_s, ids_hash, self._fill_s)

    def cancel(self, fetch: Fetch, reason: str) -> None:
        """Have a prompt no longer fetched. It is over once nothing writes any more. Idempotent."""
        if fetch.is_over:
            return
        fetch.failure = fetch.failure or reason
        for transfer_id in fetch.prompts:
            self._plane.cancel(transfer_id)
        if not fetch.reading:
            self._end_fetch(fetch)

    def check_hold(self, fetch: Fetch) -> None:
        """Give up a prompt that has waited too long: its lease is not renewed any more."""
        if not fetch.is_over and not fetch.reading and self._clock() > fetch.held_until:
            self.cancel(fetch, f"no pages for it within {self._hold_timeout_s:.0f} s")

    def is_quiescent(self, room: int) -> bool:
        """Whether nothing writes to what a room's prompt was to be fetched into."""
        self.handle_events()
        fetch = self._fetches.get(room)
        return fetch is None or not fetch.reading

    # Events of the plane.

    def handle_events(self) -> None:
        """Note what has happened since the last call: loans and fetches tell."""
        self.polls += 1
        for event in self._plane.take_events():
            match event:
                case LeaseEnded():
                    loan = self._loans.get(event.transfer_id)
                    self.leases_expired += event.cause == "expired"
                    if loan is not None:
                        self._end_loan(loan, "" if event.cause == "released" else f"the lease {event.cause}")
                case LeaseRefused():
                    loan = self._loans.get(event.transfer_id)
                    if loan is not None:
                        self._end_loan(loan, _DUPLICATE)
                case PullDone() | PullFailed() | PullQuiescent():
                    fetch = self._fetches.get(int(event.transfer_id.partition(".")[0]))
                    if fetch is not None and event.transfer_id in fetch.reading:
                        self._handle_pull(fetch, event)

    def _handle_pull(self, fetch: Fetch, event: PullDone | PullFailed | PullQuiescent) -> None:
        producer = fetch.prompts[event.transfer_id].engine_id
        match event:
            case PullDone():
                self.counts.pull_done(producer, event)
                if event.first_tokens is None or not event.first_tokens.row:
                    fetch.failure = fetch.failure or "the producer sent no metadata"
                elif not fetch.row:
                    fetch.row = event.first_tokens.row
            case PullFailed():
                if event.reason not in NO_FAULT:
                    self.counts.pull_failed(producer, event)
                    log.info("room %d: its KV cannot be used: %s %s", fetch.room, event.reason, event.detail)
                fetch.is_stale = fetch.is_stale or event.reason in _STALE
                self.cancel(fetch, f"{event.reason} {event.detail}".rstrip())
                if not event.quiescent:
                    return
        fetch.reading.discard(event.transfer_id)
        if not fetch.reading:
            self._end_fetch(fetch)

    def _end_loan(self, loan: Loan, failure: str) -> None:
        loan.is_over, loan.failure = True, failure
        self.leased_pages -= loan.num_pages
        del self._loans[loan.transfer_id]

    def _end_fetch(self, fetch: Fetch) -> None:
        fetch.is_over = True
        del self._fetches[fetch.room]
