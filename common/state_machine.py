# SPDX-License-Identifier: Apache-2.0
"""Lifecycles: an enum of states, a table of the allowed transitions, and one typed error.

    LEASE_TRANSITIONS = transitions({LeaseState.FILLING: {LeaseState.READY, LeaseState.FAILED}, …})

    self.state = transition(self.transfer_id, LEASE_TRANSITIONS, self.state, LeaseState.READY)

Every table is a public constant of its module, `*_TRANSITIONS`, and stands next to its enum.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping
from types import MappingProxyType
from typing import TypeAlias, TypeVar

S = TypeVar("S", bound=Hashable)
Transitions: TypeAlias = Mapping[S, frozenset[S]]
"""The states that each state may become. A terminal state has an empty set."""


class State(enum.Enum):
    """A state of what changes it several times a request. Hashed in C: an enum's own hash is Python."""

    __hash__ = object.__hash__


class IllegalTransition(RuntimeError):
    """The table has no edge between these states: a defect of the caller."""

    def __init__(self, subject: object, origin: object, to: object) -> None:
        super().__init__(subject, origin, to)
        self.subject = subject
        self.origin = origin
        self.to = to

    def __str__(self) -> str:
        return f"{self.subject}: {_name(self.origin)} → {_name(self.to)}"


def transitions(table: Mapping[S, Collection[S]]) -> Transitions[S]:
    """Freeze a table. States that occur only as a target are terminal."""
    frozen = {state: frozenset(targets) for state, targets in table.items()}
    for targets in list(frozen.values()):
        for state in targets:
            frozen.setdefault(state, frozenset())
    return MappingProxyType(frozen)


def transition(subject: object, table: Transitions[S], origin: S, to: S) -> S:
    """Return `to`. Raises `IllegalTransition`, which names the `subject`, if the table has no such edge."""
    if to not in table[origin]:
        raise IllegalTransition(subject, origin, to)
    return to


def _name(state: object) -> object:
    return state.value if isinstance(state, enum.Enum) else state
