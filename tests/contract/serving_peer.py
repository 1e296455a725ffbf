# SPDX-License-Identifier: Apache-2.0
"""What the other process does: it owns a pool with known bytes, and lets others read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from kvferry.transfer.engine import EngineOptions, open_engine
from tests.contract.pools import allocations, pattern
from tests.standins.faults import tcp

MAX_KNOWN_BYTES = 64 << 20
"""What follows in a larger pool is zero."""


def serve(
    connection: Connection,
    backend: str,
    backend_options: Mapping[str, str],
    pool_bytes: int,
    secret: bytes,
    device: str,
    fault: str | None,
    num_regions: int,
) -> None:
    """Say how the engine and the pool are described, then serve until the connection ends."""
    options = EngineOptions(
        name=f"serving-{backend}-{os.getpid()}",
        bind_host="127.0.0.1",
        advertise_host="127.0.0.1",
        backend_options=backend_options,
    )
    with tcp.injected(fault):
        engine = open_engine(backend, options)
    engine.admit(secret)
    pool = torch.zeros(pool_bytes, dtype=torch.uint8, device=device)
    known = torch.from_numpy(pattern(min(len(pool), MAX_KNOWN_BYTES)))
    pool[: len(known)].copy_(known)
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)
    kept = allocations(pool, num_regions)
    regions = engine.register(kept)
    connection.send((engine.describe(), [region.describe() for region in regions]))
    descriptor = engine.fileno()
    waits: list[Any] = [connection] if descriptor is None else [connection, descriptor]
    while connection not in wait(waits, 0.001 if descriptor is None else 0.05):
        engine.progress()
    engine.close()
