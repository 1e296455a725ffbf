# SPDX-License-Identifier: Apache-2.0
"""A tcp backend that damages what it sends.

A fault is written `kind:key=value,...`. Positions count bytes in the stream of one transfer. The pool
itself is never touched.

    flip:start=A,end=B     XOR 0x40 into the top byte of every element of the pool's dtype in [A, B)
    drop:after=A           close the connection after A bytes
    stall:after=A          send A bytes and then nothing more on that connection
    truncate:after=A       announce and send only the first A bytes
    delay:seconds=S        wait before the first byte
    reorder:seconds=S      answer the next request of that connection first, if one comes within S
    bit:seed=N             XOR 0x40 into the top byte of one random element

`count=N` limits any of them to the first N transfers.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast
from unittest import mock

from kvferry.transfer.backends.common.handshake import HandshakeServer
from kvferry.transfer.backends.tcp import engine
from kvferry.transfer.backends.tcp.session import TcpSession
from kvferry.transfer.engine import EngineOptions, Region
from kvferry.transfer.memory import PoolMemory

if TYPE_CHECKING:
    import torch

Kind = Literal["flip", "drop", "stall", "truncate", "delay", "reorder", "bit"]

_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "flip": frozenset({"start", "end"}),
        "drop": frozenset({"after"}),
        "stall": frozenset({"after"}),
        "truncate": frozenset({"after"}),
        "delay": frozenset({"seconds"}),
        "reorder": frozenset({"seconds"}),
        "bit": frozenset({"seed"}),
    }
)

VARIABLE = "KVFERRY_TEST_TCP_FAULT"
"""An environment variable with the fault of servers that have no flag for it (`faulty_connector`)."""
FLIPPED_BIT = 0x40
"""The one bit of an element's top byte whose flip moves attention visibly (docs/sources.md#pytorch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One parsed fault."""

    kind: Kind
    start: int = 0
    end: int = 0
    after: int = 0
    seconds: float = 0.0
    seed: int = 0
    count: int | None = None


@contextmanager
def injected(spec: str | None) -> Iterator[None]:
    """Make tcp engines that are opened meanwhile faulty. Raises ValueError for a spec that makes no sense."""
    if spec is None:
        yield
        return
    with mock.patch.object(engine, "TcpEngine", partial(FaultyTcpEngine, fault=parse_fault(spec))):
        yield


class FaultInjector:
    """Deals an engine's fault out to its transfers, however many connections they use."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._left = float("inf") if fault.count is None else fault.count
        self.random = random.Random(fault.seed)

    def next(self) -> Fault | None:
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
        seed=int(values.get("seed", 0)),
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


class FaultyTcpEngine(engine.TcpEngine):
    """A tcp engine whose responses suffer a fault."""

    def __init__(self, options: EngineOptions, fault: Fault) -> None:
        super().__init__(options)
        self._faults = FaultInjector(fault)
        self._item_bytes = 1

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        self._item_bytes = pool[0].element_size()
        return super().register(pool)

    def _new_session(self, connection: socket.socket, server: HandshakeServer) -> TcpSession:
        return FaultyTcpSession(connection, server, self._pool(), self._faults, self._item_bytes)


class FaultyTcpSession(TcpSession):
    """Answers like a `TcpSession`, but for the transfers that suffer."""

    def __init__(
        self,
        connection: socket.socket,
        server: HandshakeServer,
        memory: PoolMemory,
        faults: FaultInjector,
        item_bytes: int,
    ) -> None:
        super().__init__(connection, server, memory)
        self._faults = faults
        self._item_bytes = item_bytes
        self._held: list[memoryview] = []
        """A response that is sent when it is due, or after the next one."""
        self._due = 0.0
        self._blocked = False
        """No further request is answered: until the held response is sent, or ever."""
        self._closing = False
        """The connection ends with what is still to be sent."""

    def progress(self, now: float) -> None:
        super().progress(now)
        if self._held and self._due <= now and not self.closed:
            self._blocked = False
            self._send_held()

    def next_deadline(self) -> float | None:
        return self._due if self._held and not self.closed else super().next_deadline()

    def _next_request(self) -> bool:
        return not self._blocked and super()._next_request()

    def _send_some(self) -> int:
        sent = super()._send_some()
        if self._closing and not self._outbox:
            self.close()
        return sent

    def _respond(self, number: int, body: list[memoryview], nbytes: int) -> None:
        fault = self._faults.next()
        if fault is None:
            super()._respond(number, body, nbytes)
            self._send_held()
            return
        match fault.kind:
            case "flip":
                body = flip(body, fault, self._item_bytes)
            case "bit":
                at = self._faults.random.randrange(nbytes // self._item_bytes) * self._item_bytes
                body = flip(body, replace(fault, start=at, end=at + self._item_bytes), self._item_bytes)
            case "truncate":
                body = _first(body, fault.after)
                nbytes = sum(map(len, body))
            case "drop" | "stall":
                body = _first(body, fault.after)
                self._closing, self._blocked = fault.kind == "drop", True
        before = len(self._outbox)
        super()._respond(number, body, nbytes)
        if fault.kind == "delay" or (fault.kind == "reorder" and not self._held):
            self._due = time.monotonic() + fault.seconds
            self._blocked = fault.kind == "delay"
            while len(self._outbox) > before:
                self._held.insert(0, self._outbox.pop())
        else:
            self._send_held()

    def _send_held(self) -> None:
        self._queue(*self._held)
        self._held.clear()


def _first(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The first bytes of a stream."""
    kept = []
    for view in views:
        if nbytes <= 0:
            break
        kept.append(view[:nbytes])
        nbytes -= len(view)
    return kept
