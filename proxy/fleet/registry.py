# SPDX-License-Identifier: Apache-2.0
"""The agents of the fleet: their latest registrations, states and expiry.

Synchronous, but for `wait_for_ping`: every method changes the registry at once. The clock is an argument, so
that a test can walk through hours in a loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvferry.proxy.fleet.address_rules import (
    AddressRules,
    RejectedAgent,
    RejectedAgents,
    RejectReason,
    speaks_tls,
)
from kvferry.proxy.fleet.bias import Bias, MeanError
from kvferry.proxy.fleet.circuit_breaker import Breaker, BreakerSettings, BreakerState
from kvferry.proxy.fleet.pairing import Leg, Pairing, pairing_terms
from kvferry.proxy.fleet.snapshot import Node, NodeState, Prediction, Snapshot, Speed
from kvferry.proxy.telemetry.event_log import EventKind, EventLog
from kvferry.proxy.wire.dialects import DIALECTS, serves_alone
from kvferry.proxy.wire.registration import (
    NODE_EXPIRY_S,
    PING_INTERVAL_S,
    Bye,
    Incarnation,
    OtherRegister,
    Register,
    Role,
)

logger = logging.getLogger(__name__)

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")

STALL_S = 30.0
"""An agent that pings, but has made no progress for so long, does not work."""
SILENCE_S = 8.0
"""Requests that wait for an agent without a ping for so long are aborted."""
BUSY_LAG_S = 1.0
"""An agent whose HTTP loop is this late is busy."""
PROOF_S = 0.5
"""A ping this long after something happened to the agent was sent after that."""
MODEL_MEMORY_S = 600.0
SHARE_S = 10.0
"""Time constant of the means over an agent's shares of time that go into prompts and into decoding."""
SWEEP_INTERVAL_S = 0.05
PAUSE_CHECK_INTERVAL_S = 0.5
"""How often `check_pause` is to be called."""
LONG_PAUSE_S = 2 * PAUSE_CHECK_INTERVAL_S
"""After such a pause of this process or its host, pings wait to be read: agents are not lost for that."""
ROUNDING_S = 1e-3
"""More than floats lose in adding intervals to the clock."""
MAX_NODES = 4096
MAX_RETIRED = 4096


class Place(NamedTuple):
    """Where agents run: a host, or one address of it, such as that of a Pod, or of a server whose ranks are
    agents. `host_id`: empty if unknown.
    """

    host_id: str
    address: str = ""

    @property
    def host(self) -> Place:
        """The whole of the host."""
        return Place(self.host_id)

    def holds(self, other: Place) -> bool:
        """Return whether `other` is this place, or an address of this host."""
        return self in (other, other.host)


@dataclass(slots=True)
class LegCounts:
    """How many legs ended at an agent as they should, and how many by its failure."""

    succeeded: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Record:
    info: Register
    heard_at: float
    progress_at: float
    breaker: Breaker
    joined_at: float
    served_at: float
    """When its last ping that did not announce its end came."""
    reads_acks: bool
    legs: LegCounts = field(default_factory=LegCounts)
    ours_at_ping: int = 0
    speed: Speed = Speed()  # noqa: RUF009 (it does not change)
    prefill_share: float = 0.0
    decode_share: float = 0.0
    prefill_error: MeanError = field(default_factory=MeanError)
    decode_error: MeanError = field(default_factory=MeanError)
    connection_refused_at: float | None = None
    cordoned: bool = False
    drain_requested: bool = False
    pinned_role: Role | None = None
    """That of `info`, which registered as `both`."""


@dataclass(slots=True)
class DepartedAgent:
    """What is remembered of an agent that is gone.

    `served_at`: as in `_Record`. `heard_at`: when its last ping came; None if it said bye, for it may still
    be serving its last requests.
    """

    served_at: float
    place: Place
    heard_at: float | None


@dataclass(slots=True)
class SnapshotCache:
    """What is kept from one snapshot to the next.

    `order`: positions by incarnation; None when agents came, went or moved. `stale`: whose nodes are to be
    made anew. `changes_at`: when the first node's state may change by the passing of time. `pairing`: None
    when the terms of an agent have changed. `number`: of the last snapshot. `changed`: the positions of nodes
    that have changed since.
    """

    order: dict[Incarnation, int] | None = None
    nodes: list[Node] = field(default_factory=list)
    stale: set[Incarnation] = field(default_factory=set)
    changes_at: float = float("inf")
    pairing: Pairing | None = None
    snapshot: Snapshot | None = None
    number: int = 0
    changed: set[int] = field(default_factory=set)
    revision: int = 0

    def order_changed(self) -> None:
        self.order = None
        self.terms_changed()

    def terms_changed(self) -> None:
        self.pairing = self.snapshot = None


class Registry:
    """The agents that announced themselves, by incarnation; at most one incarnation per location.

    Args:
        clock: Monotonic seconds: the event loop's clock.
        in_flight: How many sequences this proxy has in flight at an agent.
        rules: Which addresses agents may have.
        decode_only_fallback: As in `FleetSettings`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        in_flight: Callable[[Incarnation], int] = lambda _: 0,
        breakers: BreakerSettings = BreakerSettings(),  # noqa: B008 (it is frozen)
        rules: AddressRules | None = None,
        *,
        decode_only_fallback: bool = False,
    ) -> None:
        self.events = EventLog()
        self._clock = clock
        self._subscribers: list[Callable[[Register | Bye], None]] = []
        self._watchers: dict[Incarnation, list[Callable[[], None]]] = {}
        self._in_flight = in_flight
        self._breakers = breakers
        self._rules = rules or AddressRules()
        self._decode_only_fallback = decode_only_fallback
        self._rejected = RejectedAgents()
        self._records: dict[Incarnation, _Record] = {}
        self._by_location: dict[str, Incarnation] = {}
        self._retired: OrderedDict[Incarnation, None] = OrderedDict()
        self._departed: OrderedDict[Incarnation, DepartedAgent] = OrderedDict()
        """Agents that are gone, the latest last."""
        self._models: dict[str, float] = {}
        self._pairs_out: set[tuple[Incarnation, Incarnation]] = set()
        """Prefill and decode agents that the canary keeps apart."""
        self._speeds: dict[str, Speed] = {}
        """By model: what its agents have measured last."""
        self._lost: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._swept_at = float("-inf")
        self._running_at: float | None = None
        """When `check_pause` was called last."""
        self._cache = SnapshotCache()

    @property
    def num_agents(self) -> int:
        """Agents that are registered, whatever their state."""
        return len(self._records)

    @property
    def lost(self) -> Mapping[str, int]:
        """How many agents of each role have gone without a word of it: they were killed, or cut off."""
        return MappingProxyType(self._lost)

    def legs(self) -> Iterator[tuple[Register, LegCounts]]:
        """Yield the registered agents, those that came first in front, and how their legs ended."""
        return ((record.info, record.legs) for record in self._records.values())

    def subscribe(self, subscriber: Callable[[Register | Bye], None]) -> None:
        """Have every registration that is accepted, and every goodbye, passed to `subscriber`."""
        self._subscribers.append(subscriber)

    @contextmanager
    def watching(self, agents: Collection[Incarnation], callback: Callable[[], None]) -> Iterator[None]:
        """While open, call `callback` whenever one of these agents pings or is removed."""
        for agent in agents:
            self._watchers.setdefault(agent, []).append(callback)
        try:
            yield
        finally:
            for agent in agents:
                self._watchers[agent].remove(callback)
                if not self._watchers[agent]:
                    del self._watchers[agent]

    def register(
        self, info: Register, heard_at: float | None = None, *, reads_acks: bool = True
    ) -> RejectReason | None:
        """Apply one ping, heard now unless it is said when. Returns None when it was accepted, else why it
        changed nothing. `reads_acks`: its sender does what an ack asks of it.

        A new incarnation at a known address replaces the old one, whose own late pings are rejected from then
        on: what was known about it must not come back (X23).
        """
        now = self._clock() if heard_at is None else heard_at
        self.sweep()
        rejected = self.reject_reason(info)
        if rejected is not None:
            self._rejected.note(info, rejected, now)
            if rejected in (RejectReason.PLAINTEXT, RejectReason.ADDRESS, RejectReason.FULL):
                self._note(EventKind.PING_REJECTED, info, rejected.value)
            return rejected
        incarnation = info.incarnation
        record = self._records.get(incarnation)
        if record is not None and record.pinned_role is not None:
            info = msgspec.structs.replace(info, role=record.pinned_role)
        if record is None:
            self._replace_at(info)
            logger.info("agent %s joined: %s %s %s", incarnation, info.role, info.model, info.location)
            breaker = Breaker(incarnation, self._breakers)
            self._records[incarnation] = record = _Record(info, now, now, breaker, now, now, reads_acks)
            self._note(EventKind.JOINED, info, info.state)
            self._cache.order_changed()
        else:
            if info.location != record.info.location:
                self._by_location.pop(record.info.location, None)
                self._replace_at(info)
                self._cache.order_changed()
            elif pairing_terms(info) != pairing_terms(record.info):
                self._cache.terms_changed()
            self._update(record, info, now)
        record.ours_at_ping = self._in_flight(incarnation)
        self._cache.stale.add(incarnation)
        self._by_location[info.location] = incarnation
        if info.model:
            self._note_model(info.model, now)
            record.speed = self._speeds[info.model] = _speed(info, self._speeds.get(info.model, record.speed))
        self._publish(info)
        self._call_watchers(incarnation)
        return None

    def reject_reason(self, info: Register) -> RejectReason | None:
        """Return why this ping would change nothing, or None if it would be accepted."""
        incarnation = info.incarnation
        record = self._records.get(incarnation)
        if not self.advertises(info):
            if self._rules.tls_only and not speaks_tls(info):
                return RejectReason.PLAINTEXT
            if not self._rules.allow(info):
                return RejectReason.ADDRESS
        if incarnation in self._retired:
            return RejectReason.RETIRED
        if record is not None and info.index < record.info.index:
            return RejectReason.STALE
        if record is None and len(self._records) >= MAX_NODES and info.location not in self._by_location:
            return RejectReason.FULL
        return None

    def advertises(self, info: Register) -> bool:
        """Return whether the agent is registered with the addresses that this ping has."""
        record = self._records.get(info.incarnation)
        return record is not None and (record.info.address, record.info.control) == (
            info.address,
            info.control,
        )

    def reject_version(self, info: OtherRegister) -> None:
        """Note an agent whose pings are of a version that is not spoken here."""
        self._rejected.note(info, RejectReason.VERSION, self._clock())

    def bye(self, incarnation: Incarnation) -> None:
        """Remove an agent. Idempotent; a ping of it that is still on its way is rejected."""
        if incarnation in self._records:
            self._remove(incarnation, "said bye", EventKind.LEFT)
            self._retire(incarnation)
            self._publish(Bye(incarnation=incarnation))

    def connection_refused(self, incarnation: Incarnation) -> None:
        """Take the agents of its server out of rotation until they ping again: a connection was refused.

        A ping within one interval may have been sent before the refusal, and does not count.
        """
        for key, record in self._server_of(incarnation):
            logger.warning("agent %s at %s refuses connections", key, record.info.location)
            record.connection_refused_at = self._clock()
            self._note(EventKind.CONNECTION_REFUSED, record.info)
            self._cache.stale.add(key)

    def cordon(self, incarnation: Incarnation, cordoned: bool = True) -> bool:
        """Take the agent out of rotation, or put it back; what runs there goes on. False: no such agent."""
        record = self._records.get(incarnation)
        if record is None:
            return False
        if record.cordoned != cordoned:
            self._note(EventKind.CORDONED if cordoned else EventKind.UNCORDONED, record.info)
            logger.info("agent %s was %s", incarnation, "cordoned" if cordoned else "uncordoned")
        record.cordoned = cordoned
        self._cache.stale.add(incarnation)
        return True

    def pin_role(self, incarnation: Incarnation, role: Role) -> bool | None:
        """Use an agent that registered as `both` for one role alone, or for both again. What runs goes on.

        Returns None for an agent that is not known, and False for one that registered with another role.
        """
        record = self._records.get(incarnation)
        if record is None:
            return None
        if record.pinned_role is None and record.info.role != "both":
            return False
        record.pinned_role = None if role == "both" else role
        if record.info.role != role:
            record.info = msgspec.structs.replace(record.info, role=role)
            self._cache.terms_changed()
            self._cache.stale.add(incarnation)
            self._note(EventKind.ROLE_PINNED, record.info, role)
            logger.info("agent %s is used as %s", incarnation, role)
            self._publish(record.info)
        return True

    def keep_apart(self, prefill: Incarnation, decode: Incarnation, out: bool, detail: str) -> None:
        """Take a pair out of rotation, or put it back: what the canary has found. `detail`: for operators."""
        first, second = self._records.get(prefill), self._records.get(decode)
        if first is None or second is None or ((prefill, decode) in self._pairs_out) == out:
            return
        (self._pairs_out.add if out else self._pairs_out.discard)((prefill, decode))
        self._cache.terms_changed()
        kind = EventKind.PAIR_OUT if out else EventKind.PAIR_BACK
        self._note(kind, second.info, f"{first.info.name or first.info.location}: {detail}")
        level = logging.ERROR if out else logging.INFO
        logger.log(level, "canary: %s with %s: %s: %s", prefill, decode, kind.value.replace("_", " "), detail)

    def drain(self, incarnation: Incarnation) -> bool | None:
        """Take the agents of its server out of rotation for good: acks ask them to drain from now on.

        Returns None for an agent that is not known, and False for one that does not read acks.
        """
        ranks = self._server_of(incarnation)
        if not ranks:
            return None
        if not all(record.reads_acks for _, record in ranks):
            return False
        for key, record in ranks:
            if not record.drain_requested:
                self._note(EventKind.DRAIN_REQUESTED, record.info)
                logger.info("agent %s is asked to drain", key)
            record.drain_requested = True
            self._cache.stale.add(key)
        return True

    def drain_requested(self, incarnation: Incarnation) -> bool:
        """Return whether the agent is to be asked to drain."""
        record = self._records.get(incarnation)
        return record is not None and record.drain_requested

    def attempt_started(self, agents: Iterable[Incarnation]) -> None:
        """Report an attempt to the circuit breakers of its agents."""
        for incarnation in agents:
            record = self._records.get(incarnation)
            if record is not None and record.breaker.state is not BreakerState.CLOSED:
                record.breaker.sent(self._clock())
                self._cache.stale.add(incarnation)

    def leg_succeeded(self, incarnation: Incarnation) -> None:
        """Report a leg that ended as it should to the agent's circuit breaker."""
        if (record := self._records.get(incarnation)) is not None:
            record.legs.succeeded += 1
            before = record.breaker.state
            if record.breaker.failures or before is not BreakerState.CLOSED:
                record.breaker.succeeded()
            if record.breaker.state is not before:
                self._note(EventKind.BREAKER_CLOSED, record.info)
                self._cache.stale.add(incarnation)

    def leg_failed(self, incarnation: Incarnation) -> None:
        """Report to the agent's circuit breaker that it was lost, timed out, or sent an invalid response."""
        if (record := self._records.get(incarnation)) is not None:
            record.legs.failed += 1
            before = record.breaker.state
            record.breaker.failed(self._clock())
            if record.breaker.state is not before:
                self._note(EventKind.BREAKER_OPENED, record.info)
            self._cache.stale.add(incarnation)

    def sweep(self) -> None:
        """Remove the agents whose pings have stopped, and the models that have long not been served.

        Looks at everything, so it does nothing if called again within `SWEEP_INTERVAL_S`; nor when this
        process has just paused, until `check_pause` is called.
        """
        now = self._clock()
        if now - self._swept_at < SWEEP_INTERVAL_S:
            return
        if self._running_at is not None and now - self._running_at > LONG_PAUSE_S:
            return
        self._swept_at = now
        expired = [key for key, record in self._records.items() if now - record.heard_at >= _expiry(record)]
        for incarnation in expired:
            self._count_lost(incarnation)
            self._remove(incarnation, "expired: its pings stopped", EventKind.LOST)
        for record in self._records.values():
            if record.info.model:  # other engines' pings have none
                self._models[record.info.model] = now
        for model in [name for name, seen in self._models.items() if now - seen >= MODEL_MEMORY_S]:
            del self._models[model]
            self._speeds.pop(model, None)

    def check_pause(self) -> bool:
        """Note that this process runs. A pause before counts for no agent's expiry. Returns whether there was
        one: then pings, and responses, may wait to be read.
        """
        now = self._clock()
        paused_s = 0.0 if self._running_at is None else now - self._running_at
        was_paused = paused_s > LONG_PAUSE_S
        if was_paused:
            logger.warning("this process or its host paused for %.1f s", paused_s)
            for record in self._records.values():
                record.heard_at = min(now, record.heard_at + paused_s)
                record.progress_at = min(now, record.progress_at + paused_s)
            for departed in self._departed.values():
                if departed.heard_at is not None:
                    departed.heard_at = min(now, departed.heard_at + paused_s)
            self._cache.stale.update(self._records)
        self._running_at = now
        return was_paused

    def snapshot(self) -> Snapshot:
        """Return all agents as they are now; the same object while nothing changes."""
        self.sweep()
        now, cache = self._clock(), self._cache
        self._refresh(now)
        last = cache.snapshot
        if last is None or self._models.keys() != last.models:
            names = last.models if last and self._models.keys() == last.models else frozenset(self._models)
            if cache.pairing is None:
                cache.pairing = Pairing([node.info for node in cache.nodes], frozenset(self._pairs_out))
            cache.number += 1
            changed, cache.changed = frozenset(cache.changed), set()
            cache.snapshot = last = Snapshot(tuple(cache.nodes), cache.pairing, names, cache.number, changed)
        return last

    def rejected_agents(self) -> tuple[RejectedAgent, ...]:
        """Return the agents whose registrations were rejected lately, latest first."""
        return self._rejected.lately(self._clock())

    def revision(self) -> int:
        """Return a number that grows whenever the agents differ in anything that routing goes by."""
        self.sweep()
        self._refresh(self._clock())
        return self._cache.revision

    def is_alive(self, incarnation: Incarnation) -> bool:
        """Return whether the agent pings and makes progress; it may be out of rotation."""
        self.sweep()
        record = self._records.get(incarnation)
        return record is not None and not _stalled(record, self._clock())

    def is_busy(self, incarnation: Incarnation) -> bool:
        """Return whether the agent works, but has more to do than it can: a slow response is no failure."""
        if not self.is_alive(incarnation):
            return False
        info = self._records[incarnation].info
        return info.load.waiting > 0 or info.loop_lag_s >= BUSY_LAG_S

    def is_leaving(self, incarnation: Incarnation) -> bool:
        """Return whether the agent's end was announced before, by itself or by an operator."""
        record = self._records.get(incarnation)
        if record is None:
            return False
        # What dies says so too, in the moment of its death.
        long_since = self._clock() - record.served_at > PING_INTERVAL_S + PROOF_S
        is_asked = record.cordoned or record.drain_requested
        return is_asked or (record.info.state == "draining" and long_since)

    def has_served_since(self, incarnation: Incarnation, at: float) -> bool | None:
        """Return whether the agent went on working after `at`; None while its next ping is to be awaited."""
        self.sweep()
        record = self._records.get(incarnation)
        last = self._departed.get(incarnation) if record is None else record
        if last is not None and last.served_at >= at + PROOF_S:
            return True
        return None if record is not None else False

    def place(self, incarnation: Incarnation) -> Place:
        """Return where the agent runs or ran."""
        record = self._records.get(incarnation)
        if record is not None:
            return _place(record.info)
        gone = self._departed.get(incarnation)
        return Place("") if gone is None else gone.place

    def agents_at(self, place: Place, joined_by: float) -> frozenset[Incarnation]:
        """Return the registered agents of a place that had joined by then."""
        self.sweep()
        return frozenset(
            key
            for key, each in self._records.items()
            if each.joined_at <= joined_by
            and each.info.host_id == place.host_id
            and place.holds(_place(each.info))
        )

    def record_outcome(
        self,
        prefill: Node,
        decode: Node,
        prediction: Prediction,
        first_token_at: float | None,
        token_s: float | None,
    ) -> tuple[float | None, float | None]:
        """Compare what was predicted of a request with when its first token came, and the time per token;
        None: not known. Later predictions of the agents are corrected, from their next pings on.

        Returns the errors, as `MeanError.update` does.
        """
        first_error = token_error = None
        now = self._clock()
        if first_token_at is not None and (record := self._records.get(prefill.info.incarnation)) is not None:
            predicted_s, actual_s = prediction.first_token_at - prediction.at, first_token_at - prediction.at
            first_error = record.prefill_error.update(predicted_s, actual_s, prefill.bias.prefill, now)
        if token_s is not None and (record := self._records.get(decode.info.incarnation)) is not None:
            predicted_s = prediction.token_s or 0.0
            token_error = record.decode_error.update(predicted_s, token_s, decode.bias.decode, now)
        return first_error, token_error

    def has_substitute(self, info: Register) -> bool:
        """Return whether other agents in rotation serve the legs that this one serves, or served."""
        others = [
            node
            for node in self.snapshot().nodes
            if (node.info.model, node.info.dialect) == (info.model, info.dialect)
            and node.incarnation != info.incarnation
        ]
        legs: tuple[Leg, ...] = ("prefill", "decode") if info.role == "both" else (info.role,)
        if self._decode_only_fallback and serves_alone(info.dialect, "decode"):
            legs = ("decode",)
        return all(any(node.serves(leg) for node in others) for leg in legs)

    def find_hung(self, agents: Iterable[Register]) -> frozenset[Incarnation]:
        """Return those that do not work any more, where others in rotation can do what they did."""
        return frozenset(
            info.incarnation
            for info in agents
            if not self.is_alive(info.incarnation) and self.has_substitute(info)
        )

    def tripped(self, model: str, leg: Leg) -> list[tuple[Register, float]]:
        """Return the model's agents that would serve the leg, but for their circuit breakers, and in how many
        seconds each is tried again; the one that is tried first in front.
        """
        now = self._clock()
        tripped = [
            (record.info, max(0.0, due_at - now))
            for record in self._records.values()
            if (due_at := record.breaker.due_at) is not None
            and record.info.model == model
            and record.info.role in (leg, "both")
            and _state(record, now) is NodeState.TRIPPED
        ]
        return sorted(tripped, key=lambda each: each[1])

    def find_silent(self, agents: Iterable[Register]) -> frozenset[Incarnation]:
        """Return those of which nothing was heard for `SILENCE_S`, but for those that said bye."""
        since = self._clock() - SILENCE_S
        return frozenset(
            info.incarnation
            for info in agents
            if (heard_at := self._heard_at(info.incarnation)) is not None and heard_at <= since
        )

    async def wait_for_ping(self, agents: Collection[Incarnation], by: float) -> None:
        """Wait until one of these agents pings or is gone, until `by` on the clock at the latest."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def note() -> None:
            if not changed.done():
                changed.set_result(None)

        with self.watching(agents, note):
            await asyncio.wait((changed,), timeout=max(0.0, by - self._clock()))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the two indices disagree or a bound is passed."""
        locations = {record.info.location: key for key, record in self._records.items()}
        assert locations == self._by_location, "one incarnation per location, in both indices"
        assert not self._retired.keys() & self._records.keys(), "a retired incarnation is still registered"
        assert len(self._records) <= MAX_NODES
        assert len(self._retired) <= MAX_RETIRED and len(self._departed) <= MAX_RETIRED

    def _refresh(self, now: float) -> None:
        """Bring the kept nodes up to date: the stale ones, or all where time may have changed them."""
        cache = self._cache
        if cache.order is None:
            ordered = sorted(self._records, key=lambda key: (self._records[key].info.location, key))
            cache.order = {incarnation: position for position, incarnation in enumerate(ordered)}
            cache.nodes = [_node(self._records[incarnation], now) for incarnation in ordered]
            cache.stale.clear()
            cache.revision += 1
            cache.changes_at = min(
                (_changes_at(each, now) for each in self._records.values()), default=float("inf")
            )
        elif now >= cache.changes_at:
            cache.stale.update(cache.order)
            cache.changes_at = float("inf")
        for incarnation in cache.stale:
            position = cache.order.get(incarnation)
            if position is None:
                continue
            record = self._records[incarnation]
            node, before = _node(record, now), cache.nodes[position]
            cache.changes_at = min(cache.changes_at, _changes_at(record, now))
            if node != before:
                cache.nodes[position] = node
                cache.changed.add(position)
                cache.snapshot = None
                cache.revision += _routed_by(node) != _routed_by(before)
        cache.stale.clear()

    def _heard_at(self, incarnation: Incarnation) -> float | None:
        """Return when the agent's last ping came; None if it said bye, or if that is not known any more."""
        known = self._records.get(incarnation) or self._departed.get(incarnation)
        return None if known is None else known.heard_at

    def _publish(self, update: Register | Bye) -> None:
        for subscriber in self._subscribers:
            subscriber(update)

    def _call_watchers(self, incarnation: Incarnation) -> None:
        for callback in self._watchers.get(incarnation, ()):
            callback()

    def _note_model(self, model: str, now: float) -> None:
        self._models.pop(model, None)
        self._models[model] = now
        if len(self._models) > MAX_NODES:  # the one that was announced longest ago is in front
            oldest = next(iter(self._models))
            del self._models[oldest]
            self._speeds.pop(oldest, None)

    def _update(self, record: _Record, info: Register, now: float) -> None:
        if info.steps != record.info.steps or info.load.running == 0:
            record.progress_at = now
        if record.connection_refused_at is not None and now - record.connection_refused_at >= PING_INTERVAL_S:
            record.connection_refused_at = None
        if info.state != record.info.state:
            logger.info("agent %s is %s", info.incarnation, info.state)
            if info.state != "starting":
                self._note(EventKind.READY if info.state == "ready" else EventKind.DRAINING, info)
        if info.name and not record.info.name:
            self.events.set_name(info.incarnation, info.name)
        for producer in info.refusals.keys() - record.info.refusals.keys():
            self._note(EventKind.PAIRING_REFUSED, info, f"{self._name(producer)}: {info.refusals[producer]}")
        if info.state != "draining":
            record.served_at = now
        done, before = info.capacity, record.info.capacity
        if done is not None and before is not None and (passed_s := now - record.heard_at) > 0.0:
            prefill_s, decode_s = done.prefill_s - before.prefill_s, done.decode_s - before.decode_s
            record.prefill_share = _mean_share(record.prefill_share, prefill_s, passed_s)
            record.decode_share = _mean_share(record.decode_share, decode_s, passed_s)
        record.info = info
        record.heard_at = now

    def _server_of(self, incarnation: Incarnation) -> list[tuple[Incarnation, _Record]]:
        """Return the agent, and those that are other ranks of its server: they share its API, and its end."""
        record = self._records.get(incarnation)
        if record is None:
            return []
        if record.info.dp_rank is None:
            return [(incarnation, record)]
        return [each for each in self._records.items() if each[1].info.address == record.info.address]

    def _replace_at(self, info: Register) -> None:
        """Remove the agent at a location; all of its address where ranks were one agent, or are now."""
        taken = {info.location, info.address}
        if info.dp_rank is None:
            others = (record.info for record in self._records.values() if record.info.dp_rank is not None)
            taken |= {each.location for each in others if each.address == info.address}
        for old in [self._by_location[each] for each in taken if each in self._by_location]:
            self._count_lost(old)
            self._remove(old, "was replaced at its address", EventKind.REPLACED)
            self._retire(old)

    def _note(self, kind: EventKind, info: Register, detail: str = "") -> None:
        self.events.add(
            kind,
            self._clock(),
            agent=info.incarnation,
            name=info.name,
            address=info.location,
            role=info.role,
            model=info.model,
            detail=detail,
        )

    def _name(self, incarnation: str) -> str:
        record = self._records.get(Incarnation(incarnation))
        return incarnation if record is None else record.info.location

    def _count_lost(self, incarnation: Incarnation) -> None:
        info = self._records[incarnation].info
        if info.state != "draining":
            self._lost[info.role] += 1

    def _remove(self, incarnation: Incarnation, why: str, kind: EventKind) -> None:
        record = self._records.pop(incarnation)
        self._note(kind, record.info)
        del self._by_location[record.info.location]
        self._departed.pop(incarnation, None)
        heard_at = None if kind is EventKind.LEFT else record.heard_at
        self._departed[incarnation] = DepartedAgent(record.served_at, _place(record.info), heard_at)
        if len(self._departed) > MAX_RETIRED:
            self._departed.popitem(last=False)
        self._pairs_out = {pair for pair in self._pairs_out if incarnation not in pair}
        self._cache.order_changed()
        logger.info("agent %s at %s %s", incarnation, record.info.location, why)
        self._call_watchers(incarnation)

    def _retire(self, incarnation: Incarnation) -> None:
        self._retired[incarnation] = None
        if len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)


def _place(info: Register) -> Place:
    if info.dp_rank is not None:  # a server's ranks end together
        return Place(info.host_id, info.address)
    try:
        return Place(info.host_id, urlsplit(info.address).hostname or "")
    except ValueError:
        return Place(info.host_id)


def _expiry(record: _Record) -> float:
    """Return how long after its last ping an agent is lost: other engines ping more slowly than our own."""
    facts = DIALECTS.get(record.info.dialect)
    return NODE_EXPIRY_S * (1.0 if facts is None else facts.ping_interval_s / PING_INTERVAL_S)


def _mean_share(mean: float, spent_s: float, passed_s: float) -> float:
    share = min(1.0, max(0.0, spent_s / passed_s))
    return mean + (share - mean) * -math.expm1(-passed_s / SHARE_S)


def _speed(info: Register, others: Speed) -> Speed:
    """Return what the agent has measured, and of the rest what others of its model have."""
    capacity, links = info.capacity, info.work.links if info.work is not None else ()
    if capacity is None:
        return others
    pulls = sum(link.pulls for link in links)
    # Without a step's own time, its batches were all of one size, and what larger ones gain is not known.
    step = capacity if capacity.step_s or others.step_s is None else others
    return Speed(
        others.token_s if capacity.token_s is None else capacity.token_s,
        step.step_s,
        step.sequence_s,
        capacity.answer_tokens / capacity.answers if capacity.answers else others.answer_tokens,
        sum(link.seconds if link.tail_s is None else link.tail_s for link in links) / pulls
        if pulls
        else others.pull_s,
        others.prompt_step_s if capacity.prompt_step_s is None else capacity.prompt_step_s,
        others.prompt_token_s if capacity.prompt_token_s is None else capacity.prompt_token_s,
    )


def _node(record: _Record, now: float) -> Node:
    return Node(
        record.info,
        _state(record, now),
        record.heard_at,
        record.ours_at_ping,
        record.breaker.state,
        record.speed,
        record.prefill_share,
        record.decode_share,
        Bias(record.prefill_error.bias(now), record.decode_error.bias(now)),
        record.pinned_role is not None,
    )


def _state(record: _Record, now: float) -> NodeState:
    """Return the first of these states that applies."""
    if record.drain_requested or record.info.state == "draining":
        return NodeState.DRAINING
    if record.cordoned:
        return NodeState.CORDONED
    if record.info.state == "starting":
        return NodeState.STARTING
    if record.connection_refused_at is not None:
        return NodeState.REFUSING
    if not record.breaker.allows(now):
        return NodeState.TRIPPED
    if _stalled(record, now):
        return NodeState.STALLED
    return NodeState.READY


def _changes_at(record: _Record, now: float) -> float:
    """Return when the passing of time may next change the agent's state."""
    at, due = float("inf"), record.breaker.due_at
    if due is not None and due > now:
        at = due
    if record.info.load.running > 0 and not _stalled(record, now):
        at = min(at, record.progress_at + STALL_S - ROUNDING_S)
    return at


def _routed_by(node: Node) -> tuple[object, ...]:
    info = node.info
    return (
        node.state, node.breaker, node.ours_at_ping, info.load, info.max_model_len, info.prefill_chunk,
        pairing_terms(info),
    )  # fmt: skip


def _stalled(record: _Record, now: float) -> bool:
    if record.info.loop_lag_s >= STALL_S:
        return True
    return record.info.load.running > 0 and now - record.progress_at >= STALL_S
