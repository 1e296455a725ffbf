# SPDX-License-Identifier: Apache-2.0
"""The reading side of the cuda_ipc backend: one producer rank, whose memory is mapped while both live."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvferry.transfer.backends.common.handshake import HandshakeAddress, HandshakePeer, PeerState
from kvferry.transfer.backends.cuda_ipc.device import Device
from kvferry.transfer.backends.cuda_ipc.driver import CudaError, ExportedMemory, MappedMemory
from kvferry.transfer.backends.cuda_ipc.launches import CudaIpcTransfer, Launches
from kvferry.transfer.engine import PeerUnreachable
from kvferry.transfer.layout import SpanTable, addresses, check_bounds


class OwnRegion(Protocol):
    """A region of our pool, by address."""

    address: int
    nbytes: int


class CudaIpcAddress(
    msgspec.Struct, frozen=True, kw_only=True, rename={"canary": "proof", "canary_memory": "proof_memory"}
):
    """Where an engine's handshake is, and memory of its device that holds the bytes of `canary`."""

    greeting: HandshakeAddress
    canary: bytes
    canary_memory: ExportedMemory


class CudaIpcPeer(HandshakePeer[CudaIpcTransfer]):
    """One producer rank; see `transfer.engine.Peer`. `pool` is its memory, `ours` our pool's regions."""

    def __init__(
        self,
        device: Device,
        launches: Launches,
        address: CudaIpcAddress,
        pool: Sequence[ExportedMemory],
        ours: Sequence[OwnRegion],
        token: bytes,
        selector: selectors.BaseSelector,
        deadline: float,
    ) -> None:
        super().__init__("cuda_ipc", address.greeting, token, selector, deadline)
        self._device = device
        self._launches = launches
        self._address = address
        self._pool = pool
        self._sizes = [each.nbytes for each in ours], [each.nbytes for each in pool]
        self._destinations = [each.address for each in ours]
        self._mapped: list[MappedMemory] = []
        """One for each allocation of the peer's."""
        self._sources: list[int] = []
        """Addresses of its regions for our device."""

    @property
    def finished(self) -> bool:
        """Lost, and its memory unmapped."""
        return self.state is PeerState.LOST and not self._mapped

    def read(self, spans: SpanTable, timeout_s: float) -> CudaIpcTransfer:
        """Queue a read. Raises ValueError for a span outside the peer's pool or ours."""
        check_bounds(spans, *self._sizes)
        rows = spans.copy()
        if self.state is PeerState.READY:
            rows[:, 0] = addresses(spans[:, 0], self._destinations)
            rows[:, 1] = addresses(spans[:, 1], self._sources)
        transfer = CudaIpcTransfer(rows, time.monotonic() + timeout_s)
        if self.state is not PeerState.READY:
            transfer.fail("peer_lost")
        self.transfers.append(transfer)
        self._launches.add(transfer)
        return transfer

    def release_memory(self) -> None:
        """Unmap the memory of a lost peer once no launch reads from it: a dead owner's stays allocated until
        then.
        """
        self.transfers = [each for each in self.transfers if not each.quiescent]
        if self.state is PeerState.LOST and not self.transfers:
            while self._mapped:
                self._device.unmap_memory(self._mapped.pop())

    def _accepted(self, welcome: bytes) -> None:
        """Map the canary and compare it: on another host the handle might be valid for other memory."""
        theirs = self._address
        if theirs.canary_memory.nbytes != len(theirs.canary):
            raise PeerUnreachable("its canary is not as long as described")
        try:
            canary = self._device.map_memory(theirs.canary_memory)
            try:
                seen = self._device.read_bytes(canary)
            finally:
                self._device.unmap_memory(canary)
            if seen != theirs.canary:
                raise PeerUnreachable("its handles are of other memory")
            self._map_pool()
        except CudaError as error:
            raise PeerUnreachable(str(error)) from error

    def _map_pool(self) -> None:
        """Map each allocation once, however many regions lie in it: CUDA does not map one twice."""
        mappings: dict[bytes, MappedMemory] = {}
        for region in self._pool:
            if region.handle not in mappings:
                mappings[region.handle] = self._device.map_memory(region)
                self._mapped.append(mappings[region.handle])
            self._sources.append(mappings[region.handle].mapping + region.offset)
