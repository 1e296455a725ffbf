# SPDX-License-Identifier: Apache-2.0
"""How busy an agent is now, judged from its last ping and from what this proxy has given it since."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.proxy.fleet.registry import Leg, Node
from kvferry.proxy.wire.messages import Incarnation


class Slots:
    """Every attempt acquires slots at its agents when it is routed, and releases them as its legs end.

    A prefill leg is one sequence, however many choices it samples; any other leg is one for each choice.
    """

    def __init__(self) -> None:
        self._taken: dict[Incarnation, int] = {}

    def acquire(self, agent: Incarnation, count: int) -> None:
        """Count sequences that go to the agent."""
        self._taken[agent] = self._taken.get(agent, 0) + count

    def release(self, agent: Incarnation, count: int) -> None:
        """Uncount sequences that have ended; exactly once."""
        left = self._taken[agent] - count
        assert left >= 0, "a slot was released twice"
        if left:
            self._taken[agent] = left
        else:
            del self._taken[agent]

    def in_flight(self, agent: Incarnation) -> int:
        """Return how many sequences are now at this agent, or on their way to it."""
        return self._taken.get(agent, 0)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight anywhere."""
        return not self._taken


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
        return max(0, reported - node.ours_at_ping) + self._slots.in_flight(node.incarnation)

    def has_room(self, node: Node, leg: Leg, count: int) -> bool:
        """Return whether the agent could start `count` more sequences at once, instead of letting them wait.

        An agent that has nothing to do always has room: it alone knows what it can never serve.
        """
        now = self.at(node)
        if not now:
            return True
        limit = self._limits[leg] or node.info.load.max_running
        return (limit is None or now + count <= limit) and self._has_blocks(node)

    def _has_blocks(self, node: Node) -> bool:
        """Return whether blocks are left for one more, if those sent since its ping take the usual share."""
        load = node.info.load
        if not load.kv_blocks_total:
            return True  # not reported
        used = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_leased
        share = max(1.0, used / max(1, load.running))
        since = self._slots.in_flight(node.incarnation) - node.ours_at_ping
        return load.kv_blocks_free - since * share >= share
