# SPDX-License-Identifier: Apache-2.0
"""How busy agents are now, judged from their last pings and from what this proxy has given them since; and
those of which a policy picks one, with their loads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvferry.proxy.fleet.pairing import Leg
from kvferry.proxy.fleet.snapshot import Node
from kvferry.proxy.wire.registration import Incarnation


class Slots:
    """Every attempt acquires slots at its agents when it is routed, and releases them as its legs end.

    A prefill leg is one sequence, however many choices it samples; any other leg is one for each choice.
    """

    def __init__(self) -> None:
        self.taken: dict[Incarnation, int] = {}
        """By agent; to be read only. Those with none are not in it."""
        self._changed: set[Incarnation] = set()

    def acquire(self, agent: Incarnation, count: int) -> None:
        """Count sequences that go to the agent."""
        self.taken[agent] = self.taken.get(agent, 0) + count
        self._changed.add(agent)

    def release(self, agent: Incarnation, count: int) -> None:
        """Uncount sequences that have ended; exactly once."""
        self._changed.add(agent)
        left = self.taken[agent] - count
        assert left >= 0, "a slot was released twice"
        if left:
            self.taken[agent] = left
        else:
            del self.taken[agent]

    def in_flight(self, agent: Incarnation) -> int:
        """Return how many sequences are now at this agent, or on their way to it."""
        return self.taken.get(agent, 0)

    def take_changed(self) -> set[Incarnation]:
        """Return the agents whose slots have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight anywhere."""
        return not self.taken


class Loads:
    """Pure arithmetic on a `Node` and the slots.

    A ping reports how many sequences an agent has from all proxies, as of up to a second ago. What this proxy
    had in flight at that moment is replaced by what it has in flight now.

    Args:
        limits: Most sequences at one agent, by leg; None goes by what each agent reports.
    """

    def __init__(self, slots: Slots, limits: Mapping[Leg, int | None]) -> None:
        self._slots = slots
        self._limits = limits

    def at(self, node: Node) -> int:
        """Return the number of sequences at the agent, running and waiting."""
        reported = node.info.load.running + node.info.load.waiting
        return max(0, reported - node.ours_at_ping) + self._slots.taken.get(node.info.incarnation, 0)

    def with_room(self, node: Node, leg: Leg, count: int) -> int | None:
        """Return the number of sequences at the agent if it could start `count` more at once, instead of
        letting them wait; else None.

        An agent that has nothing to do always has room: it alone knows what it can never serve.
        """
        now = self.at(node)
        if not now:
            return now
        limit = self._limits[leg] or node.info.load.max_running
        has_room = (limit is None or now + count <= limit) and self._has_blocks(node)
        return now if has_room else None

    def take_changed(self) -> set[Incarnation]:
        """Return the agents whose loads have changed since the last call, without a ping."""
        return self._slots.take_changed()

    def has_room(self, node: Node, leg: Leg, count: int) -> bool:
        """Return whether the agent could start `count` more sequences at once (see `with_room`)."""
        return self.with_room(node, leg, count) is not None

    def _has_blocks(self, node: Node) -> bool:
        """Return whether blocks are left for one more, if those sent since its ping take the usual share."""
        load = node.info.load
        if not load.kv_blocks_total:
            return True  # not reported
        used = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_leased
        share = max(1.0, used / max(1, load.running))
        since = self._slots.taken.get(node.info.incarnation, 0) - node.ours_at_ping
        return load.kv_blocks_free - since * share >= share


class Candidates(ABC):
    """Agents of which a policy picks one, always in the same order."""

    pool: Sequence[int] | None = None
    """The same object for as long as the same agents may become candidates; None if not known."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int, /) -> Node: ...

    @abstractmethod
    def load(self, node: Node) -> int:
        """Return an agent's sequences, running and waiting, as far as this proxy knows."""

    @abstractmethod
    def least_loaded(self, turn: int) -> Node:
        """Return the first of the least loaded, counting from the one whose turn it is."""

    @abstractmethod
    def find(self, agents: Iterable[Incarnation]) -> list[Node]:
        """Return those of `agents` that are candidates, in order."""

    def in_pool(self) -> Iterable[Node]:
        """Return all agents of the pool."""
        return self

    def __iter__(self) -> Iterator[Node]:
        return (self[index] for index in range(len(self)))


class Listed(Candidates):
    """Candidates that were looked up for one request."""

    def __init__(self, nodes: Sequence[Node], load: Callable[[Node], int]) -> None:
        self._nodes = nodes
        self._load = load

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, index: int, /) -> Node:
        return self._nodes[index]

    def load(self, node: Node) -> int:
        return self._load(node)

    def least_loaded(self, turn: int) -> Node:
        start = turn % len(self._nodes)
        return min([*self._nodes[start:], *self._nodes[:start]], key=self._load)

    def find(self, agents: Iterable[Incarnation]) -> list[Node]:
        wanted = frozenset(agents)
        return [node for node in self._nodes if node.incarnation in wanted] if wanted else []
