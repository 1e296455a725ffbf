# SPDX-License-Identifier: Apache-2.0
"""The cuda_ipc backend: NVIDIA GPUs of one host, over NVLink or PCIe.

The producer exports its pool as a CUDA IPC handle and takes no further part: the reading GPU copies all spans
of all waiting reads by one kernel on a stream of its own, at the link's speed whatever the size of a block
(measured beside NIXL in benchmarks/results). The share of the GPU that it may occupy is an option
(`CudaIpcSettings`); while the model computes, long spans are left to the copy engines, which occupy none.

A reader's mapping keeps a dead producer's memory allocated. So both keep a connection open, and when that
ends, or the engine process closes the link, the reader unmaps as soon as no kernel reads from there.

The handshake checks a token, but does not protect the pool: every process of this host that has the handle
can read and write it. Handles are sent in `hello_ok` only.
"""

from __future__ import annotations

import importlib.util
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvferry.transfer.backends.common.handshake import HandshakeServer
from kvferry.transfer.backends.common.wakeups import Timer
from kvferry.transfer.backends.cuda_ipc.device import CudaDevice, Device
from kvferry.transfer.backends.cuda_ipc.driver import CudaError, ExportedMemory
from kvferry.transfer.backends.cuda_ipc.launches import CudaIpcTransfer, Launches
from kvferry.transfer.backends.cuda_ipc.peer import CudaIpcAddress, CudaIpcPeer
from kvferry.transfer.backends.cuda_ipc.settings import CudaIpcSettings, read_settings
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Region
from kvferry.transfer.layout import SpanTable

if TYPE_CHECKING:
    import torch

_CANARY_BYTES = 32

OpenDevice = Callable[["torch.Tensor", CudaIpcSettings, threading.Event], Device]


class CudaIpcRegion:
    """A region that peers may map."""

    def __init__(self, device: Device, memory: torch.Tensor) -> None:
        """Raises `CudaError` if the memory cannot be exported."""
        self.address = memory.data_ptr()
        self.nbytes = memory.numel() * memory.element_size()
        self._exported = device.export_memory(self.address, self.nbytes)

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._exported)


class CudaIpcEngine:
    """See `transfer.engine.TransferEngine`. `register` opens the GPU on which the pool lies."""

    name = "cuda_ipc"

    def __init__(self, options: EngineOptions, open_device: OpenDevice = CudaDevice) -> None:
        self._options = options
        self._settings = read_settings(options.backend_options)
        self._open_device = open_device
        self._canary = secrets.token_bytes(_CANARY_BYTES)
        self._canary_tensor: torch.Tensor | None = None
        self._device: Device | None = None
        self._regions: list[CudaIpcRegion] = []
        self._launches: Launches | None = None
        self._peers: list[CudaIpcPeer] = []
        self._selector = selectors.EpollSelector()
        self._timer = Timer()
        self._selector.register(self._timer, selectors.EVENT_READ, self._timer)
        self._server = HandshakeServer(options.bind_host, self._selector)

    def admit(self, secret: bytes) -> None:
        self._server.admit(secret)

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        import torch

        self._device = device = self._open_device(pool[0], self._settings, self._options.computing)
        canary = torch.frombuffer(bytearray(self._canary), dtype=torch.uint8)
        self._canary_tensor = canary.to(pool[0].device, copy=True)
        try:
            self._regions = [CudaIpcRegion(device, memory) for memory in pool]
        except CudaError as error:
            raise BackendUnavailable(f"cuda_ipc: this memory cannot be exported: {error}") from error
        self._launches = Launches(device)
        return self._regions

    def describe(self) -> bytes:
        canary = self._canary_tensor
        if canary is None or self._device is None:
            raise AssertionError("no pool is registered")
        address = CudaIpcAddress(
            greeting=self._server.address(self._options.advertise_host),
            canary=self._canary,
            canary_memory=self._device.export_memory(canary.data_ptr(), _CANARY_BYTES),
        )
        return msgspec.msgpack.encode(address)

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        try:
            address = msgspec.msgpack.decode(peer, type=CudaIpcAddress)
            pool = [msgspec.msgpack.decode(each, type=ExportedMemory) for each in regions]
        except msgspec.MsgspecError as error:
            raise PeerUnreachable(f"not a cuda_ipc engine's description: {error}") from error
        if self._device is None or self._launches is None:
            raise AssertionError("no pool is registered")
        deadline = time.monotonic() + timeout_s
        client = CudaIpcPeer(
            self._device, self._launches, address, pool, self._regions, token, self._selector, deadline
        )
        self._peers.append(client)
        return client

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> CudaIpcTransfer:
        return cast(CudaIpcPeer, peer).read(spans, timeout_s)

    def progress(self) -> None:
        """Fail the reads of peers that have ended before completing launches: a lost peer counts first."""
        for key, events in self._selector.select(0):
            key.data.on_ready(events)
        now = time.monotonic()
        self._server.progress(now)
        for peer in self._peers:
            peer.progress(now)
        if self._launches is not None:
            self._launches.progress(now)
            self._timer.set(self._launches.next_poll())
        for peer in self._peers:
            peer.release_memory()
        self._peers = [peer for peer in self._peers if not peer.finished]

    def fileno(self) -> int | None:
        return self._selector.fileno()

    def next_deadline(self) -> float | None:
        times = [self._server.next_deadline(), *(peer.next_deadline() for peer in self._peers)]
        if self._launches is not None:
            times.append(self._launches.next_deadline())
        return min((each for each in times if each is not None), default=None)

    def close(self) -> None:
        self._server.close()
        if self._launches is not None:
            self._launches.settle()
        for peer in self._peers:
            peer.close()
            peer.release_memory()
        self._peers.clear()
        if self._device is not None:
            self._device.close()
        self._selector.close()
        self._timer.close()


def open_backend(options: EngineOptions) -> CudaIpcEngine:
    """Listen for readers. Raises `BackendUnavailable` with the reason where there is no GPU or no Triton, and
    ValueError for an invalid option.
    """
    reason = probe(options.backend_options)
    if reason is not None:
        raise BackendUnavailable(reason)
    try:
        return CudaIpcEngine(options)
    except OSError as error:
        raise BackendUnavailable(f"cuda_ipc on {options.bind_host}: {error}") from error


def probe(options: Mapping[str, str]) -> str | None:
    """Why CUDA IPC does not work on this machine, or None. Two GPUs are tried by `connect`."""
    import torch

    if torch.version.cuda is None:
        return "cuda_ipc: this build of torch is without CUDA"
    if not torch.cuda.is_available():
        return "cuda_ipc: no NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "cuda_ipc: triton is not installed"
    return None
