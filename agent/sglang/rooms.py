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
from dataclasses import dataclass

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

    room: int
    num_pages: int
    is_over: bool = False
    failure: str = ""

    @property
    def was_lent(self) -> bool:
        """Whether the pages were lent, and not withdrawn. No failure of the request is this rank's then."""
        return self.failure not in (_DUPLICATE, _WITHDRAWN)


@dataclass(eq=False, slots=True)
class Fetch:
    """A prompt that is, or will be, fetched.

    `is_reading`: the plane may write to its pages. `is_over`: it does not, and the prompt is proven right,
    with the producer's metadata in `row`, unless there is a `failure`. `is_stale`: the producer is not where
    it was, or another.
    """

    room: int
    source: RemotePrompt
    is_reading: bool = False
    is_over: bool = False
    failure: str = ""
    is_stale: bool = False
    row: bytes = b""
    held_until: float = math.inf
    """By the clock; while there are no pages for it."""


class Rooms:
    """Called by one thread; only `withdraw` waits.

    Args:
        lease_limit_s: When a lease ends however often it is renewed.
        pull_timeout_s: Deadline of a pull, from when the prompt is computed.
        fill_s: How long the producer may take to compute a prompt.
        hold_timeout_s: How long a lease is renewed for a prompt that waits for pages.
    """

    def __init__(
        self,
        plane: PlaneThread,
        *,
        lease_limit_s: float,
        pull_timeout_s: float,
        fill_s: float,
        hold_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane = plane
        self._lease_limit_s = lease_limit_s
        self._pull_timeout_s = pull_timeout_s
        self._fill_s = fill_s
        self._hold_timeout_s = hold_timeout_s
        self._clock = clock
        self._loans: dict[str, Loan] = {}
        """By transfer id, until they are over."""
        self._fetches: dict[str, Fetch] = {}
        """By transfer id, until they are given up and nothing writes any more."""
        self.counts = WorkCounts()
        self.leased_pages = 0
        self.leases_expired = 0
        self.polls = 0

    # Prompts that are lent.

    def lend(
        self, room: int, pages: Sequence[int], num_tokens: int, ids_hash: str, row: bytes, token: int
    ) -> Loan:
        """Lease a prompt's pages, which are computed. `row` and `token` are for the reader."""
        loan = Loan(room, len(pages))
        if str(room) in self._loans:
            loan.is_over, loan.failure = True, _DUPLICATE
            return loan
        self._loans[str(room)] = loan
        self.leased_pages += loan.num_pages
        first = SampledTokens(choices=(SampledToken(id=token),), row=row)
        runs = (BlockRun(0, tuple(pages)),)
        self._plane.register_lease(str(room), runs, num_tokens, ids_hash, self._lease_limit_s, first)
        return loan

    def withdraw(self, loan: Loan) -> None:
        """End a lease: from the return on no reader is told that what it read is right. Idempotent."""
        if not loan.is_over:
            self._plane.withdraw(str(loan.room))
            self._end_loan(loan, _WITHDRAWN)

    # Prompts that are fetched.

    def hold(self, room: int, source: RemotePrompt) -> Fetch:
        """Keep a prompt's lease, once there is one, until there are pages to fetch it into."""
        fetch = Fetch(room, source, held_until=self._clock() + self._hold_timeout_s)
        if str(room) in self._fetches:
            fetch.is_over, fetch.failure = True, _DUPLICATE
            return fetch
        self._fetches[str(room)] = fetch
        self._plane.hold(str(room), source, self._hold_timeout_s)
        return fetch

    def fetch(self, fetch: Fetch, first: int, pages: Sequence[int], ids_hash: str) -> None:
        """Begin to read a prompt's pages from position `first` on."""
        if fetch.is_over:
            return
        fetch.is_reading = True
        runs = (BlockRun(first, tuple(pages)),)
        self._plane.pull(str(fetch.room), fetch.source, runs, self._pull_timeout_s, ids_hash, self._fill_s)

    def cancel(self, fetch: Fetch, reason: str) -> None:
        """Have a prompt no longer fetched. It is over once nothing writes any more. Idempotent."""
        if fetch.is_over:
            return
        fetch.failure = fetch.failure or reason
        self._plane.cancel(str(fetch.room))
        if not fetch.is_reading:
            self._end_fetch(fetch)

    def check_hold(self, fetch: Fetch) -> None:
        """Give up a prompt that has waited too long: its lease is not renewed any more."""
        if not fetch.is_over and not fetch.is_reading and self._clock() > fetch.held_until:
            self.cancel(fetch, f"no pages for it within {self._hold_timeout_s:.0f} s")

    def is_quiescent(self, room: int) -> bool:
        """Whether nothing writes to what a room's prompt was to be fetched into."""
        self.handle_events()
        fetch = self._fetches.get(str(room))
        return fetch is None or not fetch.is_reading

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
                    fetch = self._fetches.get(event.transfer_id)
                    if fetch is not None:
                        self._handle_pull(fetch, event)

    def _handle_pull(self, fetch: Fetch, event: PullDone | PullFailed | PullQuiescent) -> None:
        match event:
            case PullDone():
                self.counts.pull_done(fetch.source.engine_id, event)
                if event.first_tokens is None or not event.first_tokens.row:
                    fetch.failure = fetch.failure or "the producer sent no metadata"
                elif not fetch.failure:
                    fetch.row = event.first_tokens.row
                self._end_fetch(fetch)
            case PullFailed():
                if event.reason not in NO_FAULT:
                    self.counts.pull_failed(fetch.source.engine_id, event)
                    log.info("room %d: its KV cannot be used: %s %s", fetch.room, event.reason, event.detail)
                fetch.failure = fetch.failure or f"{event.reason} {event.detail}".rstrip()
                fetch.is_stale = event.reason in _STALE
                if event.quiescent:
                    self._end_fetch(fetch)
            case PullQuiescent():
                self._end_fetch(fetch)

    def _end_loan(self, loan: Loan, failure: str) -> None:
        loan.is_over, loan.failure = True, failure
        self.leased_pages -= loan.num_pages
        del self._loans[str(loan.room)]

    def _end_fetch(self, fetch: Fetch) -> None:
        fetch.is_reading, fetch.is_over = False, True
        del self._fetches[str(fetch.room)]
