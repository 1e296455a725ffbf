# SPDX-License-Identifier: Apache-2.0
"""The interface that every KV transfer backend has, and how one is opened.

Everything here is called from one thread, the rank's transfer thread, and nothing blocks: connecting, reading
and serving advance in `progress`, and `poll` returns their state.
"""

from __future__ import annotations

import enum
import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from kvferry.common.work_pool import build_struct_types
from kvferry.transfer.options import BACKENDS, SETTINGS

if TYPE_CHECKING:
    import torch

    from kvferry.transfer.layout import SpanTable


MAX_SPANS = 1 << 20
"""In one transfer. Those that serve a peer refuse more."""


class TransferError(Exception):
    """Base of what a backend raises."""


class BackendUnavailable(TransferError):
    """This backend cannot run in this process; the message says why."""


class PeerUnreachable(TransferError):
    """The peer did not respond, refused us, or is not the one that was described."""


class PeerBroken(PeerUnreachable):
    """This engine will never reach the peer again; a rebuilt one may."""


class Status(enum.Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Region(Protocol):
    """A region of a pool that peers may read."""

    def describe(self) -> bytes:
        """What a peer needs in order to address this region."""


class Peer(Protocol):
    """Another agent's engine, as seen by the one that reads from it."""

    def poll(self) -> bool:
        """True once reads may be posted. Raises `PeerUnreachable` when it failed or the deadline passed."""

    def close(self) -> None:
        """Close. Reads in flight fail; each of them knows when it is quiescent."""


class Transfer(Protocol):
    """One read in flight.

    Attributes:
        reason: Why it failed, one stable word: `cancelled`, `deadline`, `peer_lost`, `refused`, `truncated`.
        quiescent: No byte of the destination will be written any more. Always true once DONE; after FAILED it
            may turn true only later, and the destination must stay untouched until then.
    """

    reason: str | None
    quiescent: bool
    nbytes: int
    descriptors: int

    def poll(self) -> Status:
        """Return the state; DONE and FAILED are final."""

    def cancel(self) -> None:
        """Fail it, unless it has ended. What is in flight may still land until `quiescent`."""


class TransferEngine(Protocol):
    """One backend in one rank."""

    name: str

    def admit(self, secret: bytes) -> None:
        """Serve peers that hold a token minted under this secret. Backends that cannot check ignore it."""

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        """Make a pool readable: its regions, each contiguous, in order of address and all on one device.
        Spans name their bytes by virtual offsets (`layout`). Once per engine, before `describe`.

        Raises `BackendUnavailable` if it cannot be used with a pool of this kind.
        """

    def describe(self) -> bytes:
        """What a peer needs in order to connect."""

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        """Begin to connect to an engine and its regions.

        Raises `PeerUnreachable` for an invalid description, `PeerBroken` for a peer that only a new
        engine can reach.
        """

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> Transfer:
        """Begin to copy from the peer's pool into ours: `MAX_SPANS` at most. The peer must have polled true.

        Raises ValueError, and has begun nothing then, for a span outside the peer's pool or ours.
        """

    def progress(self) -> None:
        """Advance everything as far as possible without waiting."""

    def fileno(self) -> int | None:
        """A descriptor that turns readable when `progress` has work; None: it has to be polled."""

    def next_deadline(self) -> float | None:
        """When `progress` is due at the latest, whatever the descriptor says (`time.monotonic`)."""

    def close(self) -> None:
        """Close everything. Afterwards nothing writes into our pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a backend is opened with. `name` is unique per rank and life.

    `explicit`: the user named this backend rather than leave the choice to auto. `backend_options` are the
    backend's own, which only it can read. `computing` is set while the model computes, for backends that take
    from the same device.
    """

    name: str
    bind_host: str
    advertise_host: str
    explicit: bool = True
    backend_options: Mapping[str, str] = field(default_factory=dict)
    computing: threading.Event = field(default_factory=threading.Event)


def open_engine(name: str, options: EngineOptions) -> TransferEngine:
    """Open a backend. Raises ValueError for an unknown name, `BackendUnavailable` with the reason."""
    backend = _module(name)
    build_struct_types()  # a process may have several ranks, with a thread each
    engine: TransferEngine = backend.open_backend(options)
    return engine


@dataclass(frozen=True, slots=True)
class Usability:
    """Whether a backend works on this machine, and why it does not."""

    ok: bool
    reason: str


def usable(name: str, backend_options: Mapping[str, str] | None = None) -> Usability:
    """Try a backend here, with its own options. Raises ValueError for an unknown name or option."""
    reason = _module(name).probe(backend_options or {})
    return Usability(reason is None, reason or "")


def candidates(transfer: str, auto: Sequence[str] = tuple(BACKENDS)) -> tuple[str, ...]:
    """The backends that a `--transfer` value stands for, best first. Raises ValueError for an unknown one.

    `auto`: what auto stands for, where that is not every backend.
    """
    if transfer == "auto":
        return tuple(auto)
    if transfer not in BACKENDS:
        raise ValueError(f"unknown transfer backend {transfer!r}; known: auto, {', '.join(BACKENDS)}")
    return (transfer,)


def parse_backend_options(text: str) -> Mapping[str, Mapping[str, str]]:
    """Read `BACKEND.NAME=VALUE,…` into options by backend.

    Raises ValueError for what is not of that form, names a backend that takes no options, or is none of its
    options or values: also where the backend does not work on this machine.
    """
    options: dict[str, dict[str, str]] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        backend, dot, option = name.strip().partition(".")
        if not (equals and dot and option) or backend not in BACKENDS:
            raise ValueError(f"a transfer option must be BACKEND.NAME=VALUE, got {item!r}")
        if backend not in SETTINGS:
            raise ValueError(f"the transfer backend {backend} takes no options, got {item!r}")
        options.setdefault(backend, {})[option] = value.strip()
    for backend, given in options.items():
        cast("_SettingsModule", importlib.import_module(SETTINGS[backend])).read_settings(given)
    return options


def _module(name: str) -> _BackendModule:
    if name not in BACKENDS:
        raise ValueError(f"unknown transfer backend {name!r}; known: {', '.join(BACKENDS)}")
    return cast("_BackendModule", importlib.import_module(BACKENDS[name]))


class _BackendModule(Protocol):
    def open_backend(self, options: EngineOptions) -> TransferEngine: ...

    def probe(self, options: Mapping[str, str]) -> str | None: ...


class _SettingsModule(Protocol):
    def read_settings(self, options: Mapping[str, str]) -> object: ...
