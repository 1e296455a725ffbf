# SPDX-License-Identifier: Apache-2.0
"""What has happened to the agents, for the operator's page: who joined, was lost, cordoned, kept failing.

Synchronous, bounded, and without a clock of its own. Agents come and go from `/nodes`; this remembers them.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Set

import msgspec

MAX_EVENTS = 400
MAX_TEXT_CHARS = 200
_LOOK_BACK = 50
"""Among so many events an event that happens again is looked for."""


class EventKind(enum.StrEnum):
    """What happened. The values are shown to operators, with spaces for underscores."""

    JOINED = "joined"
    LEFT = "left"
    """It said goodbye."""
    LOST = "lost"
    """Its pings stopped."""
    REPLACED = "replaced"
    """Another one announced itself at its address."""
    READY = "ready"
    DRAINING = "draining"
    """It said that it finishes what it has, and stops."""
    CORDONED = "cordoned"
    """An operator took it out of rotation."""
    UNCORDONED = "uncordoned"
    ROLE_PINNED = "role_pinned"
    """An operator chose its role."""
    DRAIN_REQUESTED = "drain_requested"
    """An operator asked it to drain."""
    CONNECTION_REFUSED = "connection_refused"
    BREAKER_OPENED = "breaker_opened"
    BREAKER_CLOSED = "breaker_closed"
    PAIRING_REFUSED = "pairing_refused"
    """It found that it can never read another one's KV."""
    PAIR_OUT = "pair_out"
    """The canary found that it and a prefill agent answer otherwise than it does alone."""
    PAIR_BACK = "pair_back"
    PING_REJECTED = "ping_rejected"
    WORKER_ENDED = "worker_ended"
    """A process of the proxy ended by itself and is replaced."""


SEEN_BY_WORKERS = frozenset(
    {
        EventKind.CONNECTION_REFUSED,
        EventKind.BREAKER_OPENED,
        EventKind.BREAKER_CLOSED,
        EventKind.PAIR_OUT,
        EventKind.PAIR_BACK,
    }
)
"""What a process that serves requests finds out when it uses an agent; all else pings show."""


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one agent, `count` times in a row; `at`: the last time (monotonic seconds)."""

    kind: EventKind
    agent: str
    """Its incarnation."""
    name: str
    address: str
    role: str
    model: str
    detail: str
    count: int
    at: float


class EventLog:
    """The latest `MAX_EVENTS` events."""

    def __init__(self) -> None:
        self._events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)

    def add(
        self,
        kind: EventKind,
        at: float,
        *,
        agent: str = "",
        name: str = "",
        address: str = "",
        role: str = "",
        model: str = "",
        detail: str = "",
    ) -> None:
        """Record an event; one that repeats this agent's last one is counted with it."""
        event = FleetEvent(
            kind=kind,
            agent=agent[:MAX_TEXT_CHARS],
            name=name[:MAX_TEXT_CHARS],
            address=address[:MAX_TEXT_CHARS],
            role=role,
            model=model[:MAX_TEXT_CHARS],
            detail=detail[:MAX_TEXT_CHARS],
            count=1,
            at=at,
        )
        position = self._repeated(event)
        if position is not None:
            event = msgspec.structs.replace(event, count=self._events[position].count + 1)
            del self._events[position]
        self._events.append(event)

    def set_name(self, agent: str, name: str) -> None:
        """Name an agent in the events from before it said its name: first pings have none."""
        for position, event in enumerate(self._events):
            if event.agent == agent and not event.name:
                self._events[position] = msgspec.structs.replace(event, name=name[:MAX_TEXT_CHARS])

    def merge(self, events: Iterable[FleetEvent]) -> None:
        """Add what other logs of this host have recorded."""
        merged = sorted([*self._events, *events], key=lambda event: event.at)
        self._events.clear()
        self._events.extend(merged)

    def latest(self) -> list[FleetEvent]:
        """Return all events, latest first."""
        return list(reversed(self._events))

    def of_kinds(self, kinds: Set[EventKind]) -> list[FleetEvent]:
        """Return the events of some kinds, latest first."""
        return [event for event in reversed(self._events) if event.kind in kinds]

    def lost(self, present: Set[str]) -> Iterator[FleetEvent]:
        """Yield how agents were lost at whose addresses there is none now; `present`: all addresses now."""
        seen = set(present)
        for event in reversed(self._events):
            if event.address not in seen and event.kind in (EventKind.LOST, EventKind.LEFT):
                seen.add(event.address)
                if event.kind is EventKind.LOST:
                    yield event

    def _repeated(self, event: FleetEvent) -> int | None:
        """Return the position of this agent's last event, from the end, if it was the same."""
        for position in range(-1, -1 - min(len(self._events), _LOOK_BACK), -1):
            before = self._events[position]
            if (before.agent, before.address) == (event.agent, event.address):
                return position if (before.kind, before.detail) == (event.kind, event.detail) else None
        return None
