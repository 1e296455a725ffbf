# SPDX-License-Identifier: Apache-2.0
"""Damage that the tcp backend does on purpose to what it sends, for tests (design §8).

A fault is written `kind:key=value,...`. Positions count bytes in the stream of one transfer. The pool
itself is never touched.

    flip:start=A,end=B     XOR 0x40 into the top byte of every element in [A, B)
    drop:after=A           close the connection after A bytes
    stall:after=A          send A bytes and then nothing more on that connection
    truncate:after=A       announce and send only the first A bytes
    delay:seconds=S        wait before the first byte
    reorder:seconds=S      answer the next request of that connection first, if one comes within S

`count=N` limits any of them to the first N transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

Kind = Literal["flip", "drop", "stall", "truncate", "delay", "reorder"]

_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "flip": frozenset({"start", "end"}),
        "drop": frozenset({"after"}),
        "stall": frozenset({"after"}),
        "truncate": frozenset({"after"}),
        "delay": frozenset({"seconds"}),
        "reorder": frozenset({"seconds"}),
    }
)

FLIPPED_BIT = 0x40
"""The one bit of an element's top byte whose flip moves attention visibly (reference/measured.md §6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One parsed fault."""

    kind: Kind
    start: int = 0
    end: int = 0
    after: int = 0
    seconds: float = 0.0
    count: int | None = None


class FaultInjector:
    """Deals an engine's fault out to its transfers, however many connections they use."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault
        self._left = float("inf") if fault is None or fault.count is None else fault.count

    def draw(self) -> Fault | None:
        """What the next transfer suffers."""
        if self._left <= 0:
            return None
        self._left -= 1
        return self._fault


def parse_fault(spec: str) -> Fault:
    """Read a fault's text form. Raises ValueError that names what is wrong."""
    kind, _, rest = spec.partition(":")
    if kind not in _KEYS:
        raise ValueError(f"unknown tcp fault {kind!r}; known: {', '.join(_KEYS)}")
    values: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, text = item.partition("=")
        if key not in _KEYS[kind] | {"count"}:
            raise ValueError(
                f"tcp fault {kind} has no {key!r}; it takes {', '.join(sorted(_KEYS[kind]))}, count"
            )
        try:
            values[key] = float(text) if key == "seconds" else int(text)
        except ValueError as error:
            raise ValueError(f"tcp fault {kind}: {key} must be a number, got {text!r}") from error
        if values[key] < 0:
            raise ValueError(f"tcp fault {kind}: {key} must not be negative, got {text}")
    return Fault(
        kind=cast(Kind, kind),
        start=int(values.get("start", 0)),
        end=int(values.get("end", 0)),
        after=int(values.get("after", 0)),
        seconds=float(values.get("seconds", 0.0)),
        count=int(values["count"]) if "count" in values else None,
    )


def flip(views: list[memoryview], fault: Fault, item_bytes: int) -> list[memoryview]:
    """The same stream with damaged copies in place of the pieces that the fault touches."""
    damaged: list[memoryview] = []
    position = 0
    for view in views:
        low = max(fault.start - position, 0)
        high = min(fault.end - position, len(view))
        if low < high:
            copy = bytearray(view)
            # Little endian: an element's top byte is its last.
            first = low + (item_bytes - 1 - (position + low)) % item_bytes
            for index in range(first, high, item_bytes):
                copy[index] ^= FLIPPED_BIT
            damaged.append(memoryview(copy))
        else:
            damaged.append(view)
        position += len(view)
    return damaged
