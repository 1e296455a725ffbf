# SPDX-License-Identifier: Apache-2.0
"""Visits every state that a bounded world can reach, shortest histories first."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.common.state_machine import IllegalTransition
from tests.model.machines import Machines
from tests.model.protocol import Protocol, Violation
from tests.model.world import Bounds, World


class Counterexample(AssertionError):
    """A history after which something does not hold."""

    def __init__(self, error: BaseException, history: list[str]) -> None:
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(history, 1))
        super().__init__(f"{type(error).__name__}: {error}\n{steps}")
        self.history = history


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What an exploration visited. `complete`: nothing was left out for the bound on depth."""

    states: int
    steps: int
    depth: int
    complete: bool
    seen: frozenset[str]
    """Kinds of step taken, and ways in which pulls and leases ended."""


def explore(bounds: Bounds, machines: Machines | None = None) -> Coverage:
    """Visit all of it. Raises `Counterexample`, the shortest there is, if a check fails anywhere."""
    protocol = Protocol(bounds, machines or Machines())
    start = protocol.start()
    for name in bounds.begin:
        start = dict(protocol.steps(start))[name]()
    parents: dict[World, tuple[World, str] | None] = {start: None}
    frontier = [start]
    steps = depth = 0
    while frontier and depth < bounds.depth:
        depth += 1
        reached: list[World] = []
        for world in frontier:
            for name, step in protocol.steps(world):
                steps += 1
                try:
                    after = step()
                    if after not in parents:
                        protocol.check(after)
                except (Violation, IllegalTransition, AssertionError, KeyError, ValueError) as error:
                    raise Counterexample(error, [*_history(parents, world), name]) from error
                if after not in parents:
                    parents[after] = (world, name)
                    reached.append(after)
        frontier = reached
    return Coverage(
        states=len(parents),
        steps=steps,
        depth=depth,
        complete=not frontier,
        seen=frozenset(protocol.seen),
    )


def _history(parents: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    history: list[str] = []
    while (parent := parents[world]) is not None:
        world, name = parent
        history.append(name)
    return history[::-1]
