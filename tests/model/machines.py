# SPDX-License-Identifier: Apache-2.0
"""The product's state machines as values: a handle is one machine in one state, and a call gives another.

A machine is pure, so what a call does to a state is computed once, on a deep copy, and remembered. Every
attribute of a machine is part of its state: nothing is listed by hand here that a new field could escape.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from copy import deepcopy
from enum import Enum
from types import ModuleType
from typing import Any

import kvferry.transfer.consumer.pull
import kvferry.transfer.producer.lease
import kvferry.transfer.ranks.aggregate

Handle = int


class Machines:
    """Every state that a machine has been seen in. The modules may be mutated copies of the product's."""

    def __init__(
        self,
        *,
        lease: ModuleType = kvferry.transfer.producer.lease,
        pull: ModuleType = kvferry.transfer.consumer.pull,
        aggregate: ModuleType = kvferry.transfer.ranks.aggregate,
    ) -> None:
        self.lease = lease
        self.pull = pull
        self.aggregate = aggregate
        self._machines: list[Any] = []
        self._handles: dict[Hashable, Handle] = {}
        self._memo: dict[tuple[Hashable, ...], tuple[Handle, Any]] = {}

    def keep(self, machine: Any) -> Handle:
        """Return the handle of a machine that is not changed from now on."""
        frozen = freeze(machine)
        handle = self._handles.get(frozen)
        if handle is None:
            handle = self._handles[frozen] = len(self._machines)
            self._machines.append(machine)
        return handle

    def __getitem__(self, handle: Handle) -> Any:
        """The machine, to look at only."""
        return self._machines[handle]

    def call(self, handle: Handle, method: str, *args: Hashable) -> tuple[Handle, Any]:
        """What `machine.method(*args)` leaves behind and returns. Its exceptions pass through."""
        key = (handle, method, args)
        known = self._memo.get(key)
        if known is None:
            machine = deepcopy(self._machines[handle])
            result = getattr(machine, method)(*args)
            known = self._memo[key] = (self.keep(machine), result)
        return known


def freeze(value: Any) -> Hashable:
    """A hashable value that is equal for equal states."""
    match value:
        case None | bool() | int() | float() | str() | bytes() | Enum():
            return value
        case OrderedDict():
            return tuple((freeze(key), freeze(each)) for key, each in value.items())
        case dict():
            return frozenset((freeze(key), freeze(each)) for key, each in value.items())
        case set() | frozenset():
            return frozenset(map(freeze, value))
        case list() | tuple():
            return tuple(map(freeze, value))
    if dataclasses.is_dataclass(value):
        fields = tuple(freeze(getattr(value, field.name)) for field in dataclasses.fields(value))
        return (type(value).__name__, fields)
    return (type(value).__name__, tuple((name, freeze(each)) for name, each in sorted(vars(value).items())))
