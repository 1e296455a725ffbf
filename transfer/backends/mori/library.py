# SPDX-License-Identifier: Apache-2.0
"""The library with its one engine in this rank."""

from __future__ import annotations

from typing import Any

from kvferry.transfer.backends.mori.settings import MoriSettings, create_engine
from kvferry.transfer.backends.mori.transfer import Lanes
from kvferry.transfer.engine import BackendUnavailable


class Library:
    """`mori.io` (`module`), our engine in it, and keys of engines to which its queue pairs are broken."""

    def __init__(self, name: str, host: str, settings: MoriSettings) -> None:
        try:
            import mori.io as module
        except ImportError as error:
            raise BackendUnavailable(f"mori: {error}") from error
        try:
            self.engine: Any = create_engine(module, name, host, settings)
        except (RuntimeError, OSError) as error:
            raise BackendUnavailable(f"mori: {error}") from error
        self.module: Any = module
        self.settings = settings
        self.broken: set[str] = set()
        codes = module.StatusCode
        self.lanes = Lanes(
            count=settings.qp_per_transfer,
            # Through self, as transfers that outlive the engine must not keep it.
            next_uid=lambda: int(self.engine.allocate_transfer_uid()),
            peer_error=codes.ERR_RDMA_OP,
            gpu_error=codes.ERR_GPU_OP,
        )

    def close(self) -> None:
        """Destroy the engine, and with it everything that could still write."""
        self.engine = None
