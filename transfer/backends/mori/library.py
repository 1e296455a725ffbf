# SPDX-License-Identifier: Apache-2.0
"""MORI-IO, and this rank's one engine in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvferry.transfer.backends.mori.settings import MoriSettings
from kvferry.transfer.backends.mori.transfer import Lanes
from kvferry.transfer.engine import BackendUnavailable

_MAX_FAILURES = 64
"""Failures taken from the library at a time; the rest waits for the next."""
_FATAL = ("LOCAL_DEVICE_FATAL", "LOCAL_CQ_ERROR")
"""Failures of what all queue pairs share, which never recovers."""


@dataclass(frozen=True, slots=True)
class PeerFailure:
    """What the library has noticed without being asked.

    `engine_key` is empty when all peers are concerned. `fatal`: their queue pairs will never work again.
    """

    engine_key: str
    reason: str
    fatal: bool


class MoriLibrary:
    """`mori.io` (`module`), our engine, and the keys of engines to which its queue pairs are broken."""

    def __init__(self, name: str, host: str, settings: MoriSettings) -> None:
        try:
            import mori.io as module
        except (ImportError, OSError) as error:  # OSError: a shared library that it loads is missing
            raise BackendUnavailable(f"mori: {error}") from error
        try:
            self.engine: Any = create_engine(module, name, host, settings)
        except (RuntimeError, OSError) as error:
            raise BackendUnavailable(f"mori: {error}") from error
        self.module: Any = module
        self.settings = settings
        self.broken: set[str] = set()
        self.unfinished: list[Any] = []
        """Statuses that are no longer waited for: the library writes into them through bare pointers."""
        codes = module.StatusCode
        self.lanes = Lanes(
            count=settings.qp_per_transfer,
            # Through self: transfers that outlive the engine must not keep it alive.
            next_uid=lambda: int(self.engine.allocate_transfer_uid()),
            peer_error=codes.ERR_RDMA_OP,
            gpu_error=codes.ERR_GPU_OP,
        )

    def failures(self) -> Iterator[PeerFailure]:
        """Peers and devices that were found dead; none with versions before 1.2.4, which report none."""
        pop: Any = getattr(self.engine, "pop_peer_failure", lambda: None)
        for _ in range(_MAX_FAILURES):
            event = pop()
            if event is None:
                return
            reason = event.reason.name
            key = event.remote_engine_key
            yield PeerFailure(key, f"{reason}: {event.detail}", bool(key) or reason in _FATAL)

    def close(self) -> None:
        """Destroy the engine: nothing writes after that."""
        self.engine = None


def create_engine(library: Any, name: str, host: str, settings: MoriSettings) -> Any:
    """Make the library's engine with every way to move memory that exists here: RDMA, and XGMI between GPUs.

    Raises RuntimeError with the reason when there is none, or ends the process: call it in a rank only after
    `find_reason` found none.
    """
    os.environ.update(settings.environment())
    # Only with a literal 0 does the library add XGMI to RDMA, or make do with it where there is no NIC.
    os.environ.setdefault("MORI_DISABLE_AUTO_XGMI", "0")
    engine = library.IOEngine(name, library.IOEngineConfig(host, 0))
    engine.create_backend(library.BackendType.RDMA, settings.rdma_config(library))
    return engine
