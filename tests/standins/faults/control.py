# SPDX-License-Identifier: Apache-2.0
"""Control messages that the agent which sends them loses and repeats.

A fault is written `drop=0.05,dup=0.05,seed=1`: the shares of messages that are never sent and that are sent
twice. `only=renew` limits it to one type of message.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args
from unittest import mock

import msgspec
import zmq

from kvferry.transfer.control.messages import Request, Response

_TYPES = frozenset(kind.__struct_config__.tag for kind in (*get_args(Request), *get_args(Response)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFault:
    """One parsed fault."""

    drop: float = 0.0
    dup: float = 0.0
    seed: int = 0
    only: str | None = None


class _Tagged(msgspec.Struct):
    """What all control messages have in common."""

    type: str


class ControlFaults:
    """Deals a fault out to what an agent sends."""

    def __init__(self, fault: ControlFault) -> None:
        self._fault = fault
        self._random = random.Random(fault.seed)

    def copies(self, frame: bytes) -> int:
        """How many times this message is to be sent."""
        fault = self._fault
        try:
            kind = msgspec.msgpack.decode(frame, type=_Tagged).type
        except msgspec.MsgspecError:
            return 1  # no control message
        if fault.only not in (None, kind):
            return 1
        chance = self._random.random()
        if chance < fault.drop:
            return 0
        return 2 if chance < fault.drop + fault.dup else 1


@contextmanager
def injected(spec: str | None) -> Iterator[None]:
    """Make control channels faulty whose ZMQ context is made meanwhile.

    Raises ValueError for a spec that makes no sense.
    """
    if spec is None:
        yield
        return
    faults = ControlFaults(parse_control_fault(spec))

    class FaultySocket(zmq.Socket[bytes]):
        def send_multipart(self, msg_parts: Any, *args: Any, **settings: Any) -> Any:
            for _ in range(faults.copies(msg_parts[-1])):
                super().send_multipart(msg_parts, *args, **settings)

    class FaultyContext(zmq.Context[FaultySocket]):
        _socket_class = FaultySocket

    with mock.patch.object(zmq, "Context", FaultyContext):
        yield


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
