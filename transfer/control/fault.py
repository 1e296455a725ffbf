# SPDX-License-Identifier: Apache-2.0
"""Control messages lost and repeated on purpose, by the agent that sends them, for tests.

A fault is written `drop=0.05,dup=0.05,seed=1`: the shares of messages that are never sent and that are sent
twice. `only=renew` limits it to one type of message.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import get_args

from kvferry.transfer.control.messages import Answer, Request

_TYPES = frozenset(kind.__struct_config__.tag for kind in (*get_args(Request), *get_args(Answer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFault:
    """One parsed fault."""

    drop: float = 0.0
    dup: float = 0.0
    seed: int = 0
    only: str | None = None


class ControlFaults:
    """Deals a fault out to what one side of an agent sends. Raises ValueError for a bad `spec`."""

    def __init__(self, spec: str | None = None) -> None:
        self._fault = None if spec is None else parse_control_fault(spec)
        self._random = random.Random(self._fault.seed if self._fault else 0)

    def copies(self, message: Request | Answer) -> int:
        """How many times this message is to be sent."""
        fault = self._fault
        if fault is None or fault.only not in (None, message.__struct_config__.tag):
            return 1
        drawn = self._random.random()
        if drawn < fault.drop:
            return 0
        return 2 if drawn < fault.drop + fault.dup else 1


def parse_control_fault(spec: str) -> ControlFault:
    """Read a fault's text form. Raises ValueError that names what is wrong."""
    values: dict[str, str] = {}
    for item in filter(None, spec.split(",")):
        key, _, values[key] = item.partition("=")
    unknown = values.keys() - {"drop", "dup", "seed", "only"}
    if unknown or not values:
        raise ValueError(f"control fault {spec!r}: it takes drop, dup, seed and only")
    try:
        drop, dup = float(values.get("drop", 0)), float(values.get("dup", 0))
        seed = int(values.get("seed", 0))
    except ValueError as error:
        raise ValueError(f"control fault {spec!r}: {error}") from error
    if min(drop, dup) < 0 or drop + dup > 1:
        raise ValueError(f"control fault {spec!r}: drop and dup are shares that add up to 1 at most")
    only = values.get("only")
    if only is not None and only not in _TYPES:
        raise ValueError(f"control fault: no message {only!r}; there are {', '.join(sorted(_TYPES))}")
    return ControlFault(drop=drop, dup=dup, seed=seed, only=only)
