# SPDX-License-Identifier: Apache-2.0
"""The nixl backend: one-sided reads through NIXL's UCX plugin (shared memory, RDMA, or TCP).

Its progress thread stays off, as it keeps a core busy; so both ends must be polled, producers too.
Releasing a handle does not stop a transfer (docs/sources.md#nixl), so a handle is kept until NIXL
reports DONE or ERR: only then, or once the whole agent is gone, is the destination quiescent. NIXL has no
deadline of its own.

NIXL does not authenticate readers: an agent's metadata is enough to read its registered memory.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from kvferry.transfer.backends.common.regions import MemoryAddress
from kvferry.transfer.backends.common.transfer import BaseTransfer
from kvferry.transfer.backends.nixl.descriptor_lists import DescriptorLists, NixlRegionAddress
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Region, Status
from kvferry.transfer.layout import SpanTable

if TYPE_CHECKING:
    import torch

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_CANARY_BYTES = 32
_SETTLE_S = 0.02
_SETTLE_STEP_S = 0.001
_EFA_DRIVER = Path("/sys/module/efa")


class NixlAddress(
    msgspec.Struct, frozen=True, kw_only=True, rename={"canary": "proof", "canary_address": "proof_address"}
):
    """What a reader needs: NIXL's own metadata, and the address of a copy of `canary`."""

    metadata: bytes
    canary: bytes
    canary_address: MemoryAddress


class NixlRegion:
    """A region that peers may read."""

    def __init__(self, memory: torch.Tensor) -> None:
        on_host = memory.device.type == "cpu"
        self.address = NixlRegionAddress(
            address=memory.data_ptr(),
            nbytes=memory.numel() * memory.element_size(),
            device=0 if on_host else memory.get_device(),
            kind="DRAM" if on_host else "VRAM",
        )

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self.address)


class NixlTransfer(BaseTransfer):
    """One read; see `transfer.engine.Transfer`."""

    def __init__(self, api: _Api, nbytes: int, descriptors: int, deadline: float) -> None:
        super().__init__(nbytes, descriptors, deadline)
        self.quiescent = False
        self._api = api
        self._handle: Any = None

    def post(self, make: Callable[[], Any]) -> None:
        """Post the handle that `make` returns. An error is a failed transfer like any other.

        `make` has checked the request. So a handle that cannot be posted, whatever error NIXL reports, means
        that the peer or its memory is gone: UCX opens a GPU's memory only now.
        """
        try:
            self._handle = make()
        except self._api.errors as error:
            self._failed(_reason(error))
            return
        try:
            state = self._api.agent.transfer(self._handle)
        except self._api.errors:
            state = "ERR"
        self._update(state)

    def progress(self, now: float) -> None:
        """Poll NIXL; after a cancel or deadline, until nothing is in flight."""
        if self.quiescent:
            return
        try:
            state = self._api.agent.check_xfer_state(self._handle)
        except self._api.errors as error:
            self._failed(_reason(error))
            return
        self._update(state)
        if not self.quiescent and self.deadline <= now:
            self.fail("deadline")

    def abandon(self) -> None:
        """End: the agent is about to be destroyed, and nothing is written after that."""
        self.fail("peer_lost")
        self.quiescent = True
        self._handle = None

    def _update(self, state: str) -> None:
        if state == "DONE":
            self.succeed()
            self._release()
        elif state == "ERR":
            self._failed("peer_lost")

    def _failed(self, reason: str) -> None:
        """End as NIXL reported, unless it has ended already."""
        self._api.failed = True
        self.fail(reason)
        self._release()

    def _release(self) -> None:
        """Release the handle: nothing is in flight."""
        self.quiescent = True
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            self._api.agent.release_xfer_handle(handle)
        except self._api.errors:
            # The wrapper queues a handle it cannot free yet and frees it with the agent.
            del handle


class NixlPeer:
    """One producer rank; see `transfer.engine.Peer`. Its canary is read first, so it is known to answer."""

    def __init__(
        self, engine: NixlEngine, name: str, lists: DescriptorLists, address: NixlAddress, timeout_s: float
    ) -> None:
        self.name = name
        self.lists = lists
        self.transfers: list[NixlTransfer] = []
        self.closed = False
        self.bounce_buffer = np.zeros(_CANARY_BYTES, dtype=np.uint8)
        self.registration = engine.register_host(self.bounce_buffer)
        self._canary = address.canary
        self._first = engine.read_canary(self, address.canary_address, timeout_s)

    def poll(self) -> bool:
        if self.closed:
            raise PeerUnreachable("nixl: closed")
        status = self._first.poll()
        if status is Status.FAILED:
            raise PeerUnreachable(f"nixl: first read failed: {self._first.reason}")
        if status is Status.DONE and self.bounce_buffer.tobytes() != self._canary:
            raise PeerUnreachable("nixl: the peer is not the one that was described")
        return status is Status.DONE

    def close(self) -> None:
        self.closed = True
        for transfer in self.transfers:
            transfer.cancel()


class NixlEngine:
    """See `transfer.engine.TransferEngine`."""

    name = "nixl"

    def __init__(self, api: _Api) -> None:
        self._api = api
        self._peers: list[NixlPeer] = []
        self._pool: list[NixlRegionAddress] = []
        self._canary = np.frombuffer(secrets.token_bytes(_CANARY_BYTES), dtype=np.uint8).copy()
        self._registrations = [self.register_host(self._canary)]

    def admit(self, secret: bytes) -> None:
        """Do nothing: NIXL checks no token."""

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        regions = [NixlRegion(memory) for memory in pool]
        self._pool = [region.address for region in regions]
        rows = [(each.address, each.nbytes, each.device, "") for each in self._pool]
        self._registrations.append(self._api.agent.register_memory(rows, self._pool[0].kind))
        return regions

    def describe(self) -> bytes:
        address = NixlAddress(
            metadata=self._api.agent.get_agent_metadata(),
            canary=self._canary.tobytes(),
            canary_address=self._canary.ctypes.data,
        )
        return msgspec.msgpack.encode(address)

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        try:
            address = msgspec.msgpack.decode(peer, type=NixlAddress)
            pool = [msgspec.msgpack.decode(each, type=NixlRegionAddress) for each in regions]
            if len({(each.kind, each.device) for each in pool}) != 1:
                raise PeerUnreachable("nixl: the peer's pool is not in memory of one kind")
            name = self._name_of(address)
            lists = DescriptorLists(self._api.agent, name, self._pool, pool)
        except self._api.connect_errors as error:
            raise PeerUnreachable(f"nixl: {error or type(error).__name__}") from error
        client = NixlPeer(self, name, lists, address, timeout_s)
        self._peers.append(client)
        return client

    def _name_of(self, address: NixlAddress) -> str:
        """Return by which name NIXL knows an engine from now on. Ours it knows, and refuses to load."""
        if address.canary == self._canary.tobytes():
            return self._api.name
        return cast(str, self._api.agent.add_remote_agent(address.metadata))

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> NixlTransfer:
        client = cast(NixlPeer, peer)
        transfer = NixlTransfer(self._api, int(spans[:, 2].sum()), len(spans), time.monotonic() + timeout_s)
        return self._post(client, transfer, lambda: client.lists.make_read(spans))

    def register_host(self, buffer: _Bytes) -> Any:
        """Register a buffer in host memory; returns the handle to deregister it."""
        return self._api.agent.register_memory([(buffer.ctypes.data, len(buffer), 0, "")], "DRAM")

    def read_canary(self, peer: NixlPeer, address: int, timeout_s: float) -> NixlTransfer:
        """Begin to read a peer's canary into its bounce buffer."""
        agent = self._api.agent
        ours = agent.get_xfer_descs([(peer.bounce_buffer.ctypes.data, _CANARY_BYTES, 0)], "DRAM")
        theirs = agent.get_xfer_descs([(address, _CANARY_BYTES, 0)], "DRAM")
        transfer = NixlTransfer(self._api, _CANARY_BYTES, 1, time.monotonic() + timeout_s)
        return self._post(peer, transfer, lambda: agent.initialize_xfer("READ", ours, theirs, peer.name))

    def progress(self) -> None:
        self._api.agent.get_new_notifs()  # drives the worker, for the peers that read from us too
        now = time.monotonic()
        for peer in self._peers:
            for transfer in peer.transfers:
                transfer.progress(now)
            peer.transfers = [transfer for transfer in peer.transfers if not transfer.quiescent]
        self._forget_closed()

    def fileno(self) -> int | None:
        return None

    def next_deadline(self) -> float | None:
        """None: it is polled while it has work."""
        return None

    def close(self) -> None:
        if self._api.agent is None:
            return
        transfers = self._settle()
        for peer in self._peers:
            self._api.release(peer.lists)
        if self._api.failed and not transfers:
            # Nothing can write into the pool any more, so the agent may stay; what peers could read is
            # deregistered.
            self._api.leak([*self._registrations, *(peer.registration for peer in self._peers)])
        else:
            self._api.close()
        self._peers.clear()
        for transfer in transfers:
            transfer.abandon()

    def _settle(self) -> list[NixlTransfer]:
        """Let UCX end what a dead peer left in flight; returns the reads that did not end."""
        until = time.monotonic() + _SETTLE_S
        while True:
            self._api.drive()
            now = time.monotonic()
            transfers = [transfer for peer in self._peers for transfer in peer.transfers]
            for transfer in transfers:
                transfer.progress(now)
            left = [transfer for transfer in transfers if not transfer.quiescent]
            if not left or until <= now:
                return left
            time.sleep(_SETTLE_STEP_S)

    def _post(self, peer: NixlPeer, transfer: NixlTransfer, make: Callable[[], Any]) -> NixlTransfer:
        transfer.post(make)
        if not transfer.quiescent:
            peer.transfers.append(transfer)
        return transfer

    def _forget_closed(self) -> None:
        """Disconnect from closed peers, but not while a transfer of theirs is still in flight."""
        gone = [peer for peer in self._peers if peer.closed and not peer.transfers]
        if not gone:
            return
        self._peers = [peer for peer in self._peers if peer not in gone]
        for peer in gone:
            self._api.release(peer.lists)
            self._api.agent.deregister_memory(peer.registration)
        in_use = {self._api.name, *(peer.name for peer in self._peers)}
        for name in {peer.name for peer in gone} - in_use:
            self._api.remove(name)


class _Api:
    """NIXL's agent object and the exceptions that it raises."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed = False  # NIXL has reported a failed transfer, so an endpoint may be broken
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        # To notice freed memory, UCX would patch libc's mmap and the like while other threads may be in them:
        # a pause of 50 ms for each, and a race (openucx/ucx#11112). Memory is deregistered before it is
        # freed.
        os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
        # UCX's module for AWS's EFA loads wherever libibverbs's providers are installed, and without such a
        # device the process ends in a segmentation fault when it exits.
        if not _EFA_DRIVER.exists():
            os.environ.setdefault("UCX_MODULES", "^efa")
        try:
            import nixl._bindings as bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise BackendUnavailable(f"nixl: {error}") from error
        errors = [getattr(bindings, each) for each in dir(bindings) if each.endswith("Error")]
        self.errors: tuple[type[Exception], ...] = tuple(errors)
        self.open_errors: tuple[type[Exception], ...] = (RuntimeError, *self.errors)
        self.connect_errors: tuple[type[Exception], ...] = (msgspec.MsgspecError, *self.errors)
        try:
            self.agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except self.open_errors as error:
            raise BackendUnavailable(f"nixl: {error or type(error).__name__}") from error
        if "UCX" not in self.agent.backends:
            raise BackendUnavailable("nixl: its UCX plugin is missing")

    def remove(self, name: str) -> None:
        """Disconnect from a remote agent; one that is gone already is fine."""
        try:
            self.agent.remove_remote_agent(name)
        except self.errors:
            return

    def release(self, lists: DescriptorLists) -> None:
        """Release prepared lists; NIXL may have dropped those of a peer that died."""
        try:
            lists.release()
        except self.errors:
            return

    def drive(self) -> None:
        """Advance the worker at shutdown, where errors no longer matter."""
        try:
            self.agent.get_new_notifs()
        except self.errors:
            return

    def leak(self, registrations: Sequence[Any]) -> None:
        """Drop the agent without destroying it: it leaks for the life of the process, on purpose.

        Where a peer died with reads in flight, destroying UCX's worker can abort the whole process
        (`arbiter.c:36 Assertion ucs_arbiter_group_is_empty`). The agent has no thread of its own, so nothing
        drives it any more; its memory is deregistered.
        """
        for registration in registrations:
            try:
                self.agent.deregister_memory(registration)
            except self.errors:
                continue
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.agent))
        self.agent = None

    def close(self) -> None:
        """Destroy the agent."""
        self.agent = None


def open_backend(options: EngineOptions) -> NixlEngine:
    """Make an agent. Raises `BackendUnavailable` with the reason if NIXL does not run here."""
    if _is_loopback(options.bind_host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX would listen on every address of the host
    return NixlEngine(_Api(options.name))


def probe(options: Mapping[str, str]) -> str | None:
    """Why NIXL does not run in this process, or None if it does."""
    try:
        _Api("kvferry-probe").close()
    except BackendUnavailable as error:
        return str(error)
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: Exception) -> str:
    return "peer_lost" if "Disconnect" in type(error).__name__ else "refused"
