# SPDX-License-Identifier: Apache-2.0
"""One producer rank as its reader sees it: greeted, its memory borrowed, and given back when either ends."""

from __future__ import annotations

import time

import msgspec

from kvferry.transfer.backends.common.handshake import GreetingAddress, Visit
from kvferry.transfer.backends.common.peer import GreetedPeer, PeerState
from kvferry.transfer.backends.cuda_ipc.device import Device
from kvferry.transfer.backends.cuda_ipc.driver import Borrowed, CudaError, Lent
from kvferry.transfer.backends.cuda_ipc.launches import CudaIpcTransfer, Launches
from kvferry.transfer.engine import PeerUnreachable
from kvferry.transfer.layout import SpanTable, check_bounds


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank takes greetings, and memory of its device that holds the bytes of `proof`."""

    greeting: GreetingAddress
    proof: bytes
    proof_memory: Lent


class CudaIpcPeer(GreetedPeer[CudaIpcTransfer]):
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
        super().__init__("cuda_ipc", visit)
        self._device = device
        self._launches = launches
        self._address = address
        self._pool = pool
        self._pool_bytes = pool_bytes
        self._borrowed: Borrowed | None = None

    @property
    def over(self) -> bool:
        """Lost, and its memory given back."""
        return self.state is PeerState.LOST and self._borrowed is None

    def read(self, spans: SpanTable, timeout_s: float) -> CudaIpcTransfer:
        """Queue a read. Raises ValueError for a span outside the peer's pool or ours."""
        check_bounds(spans, self._pool_bytes, self._pool.nbytes)
        source = self._borrowed.address if self._borrowed is not None else 0
        transfer = CudaIpcTransfer(spans, source, time.monotonic() + timeout_s)
        if self.state is not PeerState.READY:
            transfer.fail("peer_lost")
        self.transfers.append(transfer)
        self._launches.add(transfer)
        return transfer

    def let_go(self) -> None:
        """Give the memory of a lost peer back, once no launch reads from it: a dead owner's stays taken until
        then.
        """
        self.transfers = [each for each in self.transfers if not each.quiescent]
        if self.state is PeerState.LOST and self._borrowed is not None and not self.transfers:
            self._device.give_back(self._borrowed)
            self._borrowed = None

    def _meet(self) -> None:
        """Try it rather than trust that we share a host: a handle of another might mean something here."""
        theirs = self._address
        if theirs.proof_memory.nbytes != len(theirs.proof):
            raise PeerUnreachable("its proof is not as long as it says")
        try:
            proof = self._device.borrow(theirs.proof_memory)
            try:
                seen = self._device.peek(proof)
            finally:
                self._device.give_back(proof)
            if seen != theirs.proof:
                raise PeerUnreachable("its handles lead to other memory")
            self._borrowed = self._device.borrow(self._pool)
        except CudaError as error:
            raise PeerUnreachable(str(error)) from error
