# SPDX-License-Identifier: Apache-2.0
"""How many attempts this proxy has in flight at each agent: its own count, ahead of any ping."""

from __future__ import annotations

from proxy.policy import Pair
from proxy.wire import Incarnation


class Slots:
    """Every attempt takes a slot at each of its agents when it is routed, and gives it back when it ends."""

    def __init__(self) -> None:
        self._taken: dict[Incarnation, int] = {}

    def take(self, pair: Pair) -> None:
        """Count an attempt at each of the pair's agents."""
        for node in pair.nodes:
            self._taken[node.incarnation] = self._taken.get(node.incarnation, 0) + 1

    def give_back(self, pair: Pair) -> None:
        """End what `take` began; exactly once per attempt."""
        for node in pair.nodes:
            left = self._taken[node.incarnation] - 1
            assert left >= 0, "a slot was given back twice"
            if left:
                self._taken[node.incarnation] = left
            else:
                del self._taken[node.incarnation]

    def in_flight(self, incarnation: Incarnation) -> int:
        """Attempts now at this agent."""
        return self._taken.get(incarnation, 0)

    @property
    def idle(self) -> bool:
        """Whether no attempt is in flight anywhere."""
        return not self._taken
