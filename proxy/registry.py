# SPDX-License-Identifier: Apache-2.0
"""What is known about every agent, and for how long to believe it.

Synchronous and without a clock of its own: every method changes the registry at once and is told the time
(monotonic seconds), so that a test can walk through hours in a loop.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from proxy.wire import NODE_EXPIRY_S, PING_INTERVAL_S, Incarnation, Register

logger = logging.getLogger(__name__)

Leg = Literal["prefill", "decode"]

STALL_S = 30.0
MODEL_MEMORY_S = 600.0
SWEEP_INTERVAL_S = 0.05
MAX_NODES = 4096
MAX_RETIRED = 4096
# Other engines ping more slowly: three of their intervals and a half, as for our own.
EXPIRY_S = {"native": NODE_EXPIRY_S, "atom": 3.5 * 5.0, "vllm-moriio": 3.5 * 3.0}


class NodeState(enum.StrEnum):
    """Why a known agent is, or is not, in rotation."""

    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"
    REFUSING = "refusing"
    """A connection to it was refused after its last believable ping."""
    STALLED = "stalled"
    """Something runs on it, but its engine has not stepped for 30 s."""


@dataclass(frozen=True, slots=True)
class Node:
    """One agent at one moment."""

    info: Register
    state: NodeState
    heard_at: float

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.info.incarnation)

    def serves(self, leg: Leg) -> bool:
        """Whether a request's `leg` may be given to this agent now."""
        return self.state is NodeState.READY and self.info.role in (leg, "both")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All agents at one moment, ordered by address so that a rotation over them is stable.

    `models` also holds the names that were served lately: their absence is an outage, not a wrong name.
    """

    nodes: tuple[Node, ...]
    models: frozenset[str]


@dataclass(slots=True)
class _Record:
    info: Register
    heard_at: float
    progress_at: float
    refused_at: float | None = None


class Registry:
    """The agents that announced themselves, by incarnation; at most one incarnation per address."""

    def __init__(self) -> None:
        self._records: dict[Incarnation, _Record] = {}
        self._by_address: dict[str, Incarnation] = {}
        self._retired: OrderedDict[Incarnation, None] = OrderedDict()
        self._models: dict[str, float] = {}
        self._swept_at = float("-inf")

    def register(self, info: Register, now: float) -> str | None:
        """Take one ping. Returns None when it was accepted, else the reason to tell the agent.

        A new incarnation at a known address replaces the old one, whose own late pings are refused from then
        on: what was known about it must not come back (X23).
        """
        self.sweep(now)
        incarnation = Incarnation(info.incarnation)
        if incarnation in self._retired:
            return "this incarnation said bye, or another one took its address"
        record = self._records.get(incarnation)
        if record is None:
            if len(self._records) >= MAX_NODES and info.address not in self._by_address:
                return f"this proxy already knows {MAX_NODES} agents"
            self._replace_at(info.address)
            logger.info("agent %s joined: %s %s %s", incarnation, info.role, info.model, info.address)
            self._records[incarnation] = _Record(info, heard_at=now, progress_at=now)
        else:
            if info.address != record.info.address:
                self._by_address.pop(record.info.address, None)
                self._replace_at(info.address)
            self._hear(record, info, now)
        self._by_address[info.address] = incarnation
        if info.model:
            self._models[info.model] = now
        return None

    def bye(self, incarnation: Incarnation) -> None:
        """The agent leaves. Idempotent; a ping of it that is still on its way is refused."""
        if incarnation in self._records:
            self._remove(incarnation, "said bye")
            self._retire(incarnation)

    def connection_refused(self, incarnation: Incarnation, now: float) -> None:
        """A connection to the agent was refused: out of rotation until it pings again.

        A ping within one interval may have been sent before the refusal, and does not count.
        """
        record = self._records.get(incarnation)
        if record is not None:
            logger.warning("agent %s at %s refuses connections", incarnation, record.info.address)
            record.refused_at = now

    def sweep(self, now: float) -> None:
        """Forget the agents that were silent for too long, and the models that nobody serves any more.

        Looks at everything, so it does nothing if called again within `SWEEP_INTERVAL_S`.
        """
        if now - self._swept_at < SWEEP_INTERVAL_S:
            return
        self._swept_at = now
        silent = [key for key, record in self._records.items() if now - record.heard_at >= _expiry(record)]
        for incarnation in silent:
            self._remove(incarnation, "fell silent")
        for record in self._records.values():
            if record.info.model:  # other engines' pings name none
                self._models[record.info.model] = now
        for model in [name for name, seen in self._models.items() if now - seen >= MODEL_MEMORY_S]:
            del self._models[model]

    def snapshot(self, now: float) -> Snapshot:
        """What routing may rely on at this moment."""
        self.sweep(now)
        nodes = [Node(record.info, _state(record, now), record.heard_at) for record in self._records.values()]
        nodes.sort(key=lambda node: (node.info.address, node.info.incarnation))
        return Snapshot(tuple(nodes), frozenset(self._models))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the two indices disagree or a bound is passed."""
        addresses = {record.info.address: key for key, record in self._records.items()}
        assert addresses == self._by_address, "one incarnation per address, in both indices"
        assert not self._retired.keys() & self._records.keys(), "a retired incarnation is still registered"
        assert len(self._records) <= MAX_NODES and len(self._retired) <= MAX_RETIRED

    def _hear(self, record: _Record, info: Register, now: float) -> None:
        if info.steps != record.info.steps or info.load.running == 0:
            record.progress_at = now
        if record.refused_at is not None and now - record.refused_at >= PING_INTERVAL_S:
            record.refused_at = None
        if info.state != record.info.state:
            logger.info("agent %s is %s", info.incarnation, info.state)
        record.info = info
        record.heard_at = now

    def _replace_at(self, address: str) -> None:
        old = self._by_address.get(address)
        if old is not None:
            self._remove(old, "was replaced at its address")
            self._retire(old)

    def _remove(self, incarnation: Incarnation, why: str) -> None:
        record = self._records.pop(incarnation)
        del self._by_address[record.info.address]
        logger.info("agent %s at %s %s", incarnation, record.info.address, why)

    def _retire(self, incarnation: Incarnation) -> None:
        self._retired[incarnation] = None
        if len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)


def _expiry(record: _Record) -> float:
    return EXPIRY_S.get(record.info.dialect, NODE_EXPIRY_S)


def _state(record: _Record, now: float) -> NodeState:
    """The one reason that counts, strongest first."""
    if record.info.state == "draining":
        return NodeState.DRAINING
    if record.info.state == "starting":
        return NodeState.STARTING
    if record.refused_at is not None:
        return NodeState.REFUSING
    if record.info.load.running > 0 and now - record.progress_at >= STALL_S:
        return NodeState.STALLED
    return NodeState.READY
