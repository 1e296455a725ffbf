# SPDX-License-Identifier: Apache-2.0
"""One producer rank as its reader sees it: greeted, its memory borrowed, and given back when either ends."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from transfer.backends.cuda_ipc_device import Device
from transfer.backends.cuda_ipc_driver import Borrowed, CudaError, Lent
from transfer.backends.cuda_ipc_launches import CudaIpcTransfer, Launches
from transfer.backends.greeting import GreetingAddress, Visit, VisitState
from transfer.engine import PeerUnreachable
from transfer.layout import SpanTable


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank takes greetings, and memory of its device that holds the bytes of `proof`."""

    greeting: GreetingAddress
    proof: bytes
    proof_memory: Lent


class PeerState(enum.Enum):
    GREETING = "greeting"
    READY = "ready"
    LOST = "lost"


_TABLE: Mapping[PeerState, frozenset[PeerState]] = MappingProxyType(
    {
        PeerState.GREETING: frozenset({PeerState.READY, PeerState.LOST}),
        PeerState.READY: frozenset({PeerState.LOST}),
        PeerState.LOST: frozenset(),
    }
)


class CudaIpcPeer:
    """One producer rank; see `transfer.engine.Peer`. `pool` is its memory, `pool_bytes` the size of ours."""

    def __init__(
        self,
        device: Device,
        launches: Launches,
        visit: Visit,
        address: EngineAddress,
        pool: Lent,
        pool_bytes: int,
    ) -> None:
        self.state = PeerState.GREETING
        self._device = device
        self._launches = launches
        self._visit = visit
        self._address = address
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._borrowed: Borrowed | None = None
        self._transfers: list[CudaIpcTransfer] = []
        self._error = ""

    @property
    def over(self) -> bool:
        """Lost, and its memory given back."""
        return self.state is PeerState.LOST and self._borrowed is None

    def poll(self) -> bool:
        if self.state is PeerState.LOST:
            raise PeerUnreachable(f"cuda_ipc: {self._error}")
        return self.state is PeerState.READY

    def close(self) -> None:
        self._lose("closed")

    def read(self, spans: SpanTable, timeout_s: float) -> CudaIpcTransfer:
        """Queue a read. Raises ValueError for a span outside the peer's pool or ours."""
        _check_bounds(spans, self._pool_bytes, self._pool.nbytes)
        source = self._borrowed.address if self._borrowed is not None else 0
        transfer = CudaIpcTransfer(spans, source, time.monotonic() + timeout_s)
        if self.state is not PeerState.READY:
            transfer.fail("peer_lost")
        self._transfers.append(transfer)
        self._launches.add(transfer)
        return transfer

    def progress(self, now: float) -> None:
        """Follow the connection."""
        self._visit.expire(now)
        if self._visit.state is VisitState.LOST:
            self._lose(self._visit.error)
        elif self._visit.state is VisitState.WELCOME and self.state is PeerState.GREETING:
            self._borrow()

    def let_go(self) -> None:
        """Give the memory of a lost peer back, once no launch reads from it: a dead owner's stays taken until
        then.
        """
        self._transfers = [each for each in self._transfers if not each.quiescent]
        if self.state is PeerState.LOST and self._borrowed is not None and not self._transfers:
            self._device.give_back(self._borrowed)
            self._borrowed = None

    def next_deadline(self) -> float | None:
        return self._visit.next_deadline()

    def _borrow(self) -> None:
        """Try it rather than trust that we share a host: a handle of another might mean something here."""
        try:
            proof = self._device.borrow(self._address.proof_memory)
            seen = self._device.peek(proof)
            self._device.give_back(proof)
            if seen != self._address.proof:
                self._lose("its handles lead to other memory")
                return
            self._borrowed = self._device.borrow(self._pool)
        except CudaError as error:
            self._lose(str(error))
            return
        self._transition(PeerState.READY)

    def _lose(self, why: str) -> None:
        if self.state is PeerState.LOST:
            return
        self._transition(PeerState.LOST)
        self._error = why
        self._visit.close()
        for transfer in self._transfers:
            transfer.fail("peer_lost")

    def _transition(self, to: PeerState) -> None:
        if to not in _TABLE[self.state]:
            raise AssertionError(f"peer {self.state.value} → {to.value}")
        self.state = to


def _check_bounds(spans: SpanTable, local_bytes: int, remote_bytes: int) -> None:
    """A kernel would write and read anywhere."""
    if not len(spans):
        return
    ends = (spans[:, :2] + spans[:, 2:]).max(axis=0)
    if int(spans.min()) < 0 or int(ends[1]) > remote_bytes:
        raise ValueError("a span lies outside the peer's pool")
    if int(ends[0]) > local_bytes:
        raise ValueError("a span lies outside the pool")
