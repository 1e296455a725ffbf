# SPDX-License-Identifier: Apache-2.0
"""Everything around the machines, as one immutable value: prompts, readers, the network, and the truth.

The *truth* is what the checks compare the machines with, and is never shown to them: which blocks are
promised to whom and until when, and whether their bytes are still the prompt's. Freed blocks are overwritten
at once: a read that is served later always finds wrong bytes, the worst that can happen to it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from kvferry.transfer.ids import Incarnation, TransferId
from kvferry.transfer.ranks.aggregate import Outcome
from tests.model.machines import Handle

BLOCKS = 2
"""Blocks of every prompt; one can be readable before the other is computed."""
TOKENS = 7
LEASE_S = 2
REQUEST_S = 3
"""A request's own deadline, which no renewal may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How large a world is explored.

    `pulls` are pairs of a reader and a request. With `verify` blocks come with checksums, and bytes may be
    damaged on their way, which is a fault like another. `faults` is how many things may go wrong in one
    history, of any kind; `renewals` how many renewals are sent; `time` how far the clock runs; `depth` the
    number of steps of a history, after those of `begin`, which are taken first, by name; `memory` and
    `staged` bound what the producer remembers of ended leases and of readers that came early. With `whole` a
    prompt's last block may be readable, too, before the prompt is ready. With `lent` nothing is prefilled:
    the producer's cache has the prompts' blocks, which readers ask for by their hashes; with `asked` they ask
    what there is, and pull it later.
    """

    requests: int = 2
    readers: int = 2
    pulls: tuple[tuple[int, int], ...] = ((0, 0), (1, 1))
    ranks: int = 1
    verify: bool = False
    whole: bool = False
    lent: bool = False
    asked: bool = False
    faults: int = 2
    renewals: int = 1
    time: int = 3
    depth: int = 64
    begin: tuple[str, ...] = ()
    memory: int = 64
    staged: int = 64


class Phase(Enum):
    """What the producer's scheduler did with a prompt."""

    NEW = "new"
    FILLING = "filling"
    READY = "ready"
    OVER = "over"


class Prompt(NamedTuple):
    """One request at the producer, and the truth about its lease."""

    phase: Phase = Phase.NEW
    computed: int = 0
    pinned: bool = False
    intact: bool = True
    dropped: bool = False
    limit: int = 0
    until: int = 0
    reader: int | None = None
    proven: int | None = None
    used: bool = False
    """A reader has begun to decode from it."""


class Bytes(Enum):
    """One rank's read: what its destination holds, and whether that may still change."""

    FLYING = "flying"
    RIGHT = "right"
    WRONG = "wrong"
    FAILED = "failed"
    """Given up, and still written to."""
    QUIET = "quiet"


class RankRead(NamedTuple):
    seq: int
    rank: int
    blocks: int
    state: Bytes = Bytes.FLYING
    cancelled: bool = False
    outcome: Outcome | None = None
    """How its end was reported."""
    quiescence_reported: bool = False
    """That it is quiescent was reported, with its end or later."""

    @property
    def writing(self) -> bool:
        return self.state in (Bytes.FLYING, Bytes.FAILED)


class End(Enum):
    """The event that the scheduler has had about a pull."""

    NONE = "none"
    DONE = "done"
    FAILED = "failed"
    QUARANTINED = "quarantined"


class Reading(NamedTuple):
    """One reader's pull of one request, with its part of the control channel."""

    machine: Handle
    reader: int
    request: int
    awaited: int | None = None
    seq: int = 0
    asked: bool = False
    """It knows, or will, how much there is to pull."""
    end: End = End.NONE
    reads: tuple[RankRead, ...] = ()
    verifying: bool = False
    """The ranks are summing what landed."""
    clearing: bool = False
    """The ranks are writing zeros over it."""


class Reader(NamedTuple):
    alive: bool
    aggregator: Handle


class Message(NamedTuple):
    """Something under way between a reader and the producer. One that is never delivered is a lost one."""

    kind: str
    pull: int
    seq: int
    incarnation: int = 0
    body: Hashable = None


class World(NamedTuple):
    now: int
    incarnation: int
    table: Handle
    prompts: tuple[Prompt, ...]
    pulls: tuple[Reading, ...]
    readers: tuple[Reader, ...]
    network: frozenset[Message]
    faults: int
    renewals: int


def transfer_id(request: int) -> TransferId:
    return TransferId(f"t{request}")


def incarnation(reader: int) -> Incarnation:
    return Incarnation(f"reader-{reader}")


def blocks_of(request: int) -> tuple[int, ...]:
    """The producer's blocks that hold a request's prompt."""
    return tuple(range(10 * (request + 1), 10 * (request + 1) + BLOCKS))


def hashes_of(request: int) -> tuple[bytes, ...]:
    """Of the same blocks, by their tokens."""
    return tuple(b"hash of %d" % block for block in blocks_of(request))


def checksums_of(request: int) -> tuple[bytes, ...]:
    """What the producer's ranks make of these blocks."""
    return tuple(b"sum of %d" % block for block in blocks_of(request))


def replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
