# SPDX-License-Identifier: Apache-2.0
"""State machines: an enum, a table of the transitions that it allows, and one typed error for all others."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

S = TypeVar("S", bound=enum.Enum)


class State(enum.Enum):
    """A state of what passes through several with each request. Hashed in C: an enum's own hash is Python."""

    __hash__ = object.__hash__


class IllegalTransition(RuntimeError):
    """A state change that the table does not allow: an internal error."""


def transition(table: Mapping[S, frozenset[S]], current: S, target: S, subject: object) -> S:
    """Return `target`. Raises `IllegalTransition`, which names `subject`, unless `table` allows it."""
    if target not in table[current]:
        raise IllegalTransition(f"{subject}: {current.value} → {target.value}")
    return target
