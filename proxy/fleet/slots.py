# SPDX-License-Identifier: Apache-2.0
"""How many sequences this proxy has in flight at each agent: its own count, ahead of any ping."""

from __future__ import annotations

from kvferry.proxy.wire.messages import Incarnation


class Slots:
    """Every attempt takes slots at each of its agents when it is routed, and gives them back as its legs end.

    A prefill leg is one sequence, however many choices it draws; any other leg is one for each choice.
    """

    def __init__(self) -> None:
        self._taken: dict[Incarnation, int] = {}

    def take(self, agent: Incarnation, count: int) -> None:
        """Count sequences that go to the agent."""
        self._taken[agent] = self._taken.get(agent, 0) + count

    def release(self, agent: Incarnation, count: int) -> None:
        """End what `take` began; exactly once."""
        left = self._taken[agent] - count
        assert left >= 0, "a slot was given back twice"
        if left:
            self._taken[agent] = left
        else:
            del self._taken[agent]

    def in_flight(self, agent: Incarnation) -> int:
        """Sequences now at this agent, or on their way to it."""
        return self._taken.get(agent, 0)

    def taken(self) -> dict[Incarnation, int]:
        """The sequences at every agent that has any."""
        return dict(self._taken)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight anywhere."""
        return not self._taken
