# SPDX-License-Identifier: Apache-2.0
"""A process that owns a pool with known bytes and lets others read it, through one backend.

    python -m tests.contract.serving_peer BACKEND POOL_BYTES SECRET_HEX [DEVICE [FAULT]]

Prints one line of JSON with its descriptions, then serves until it is killed or its stdin ends.
"""

from __future__ import annotations

import json
import os
import select
import sys

import torch

from tests.contract.pools import pattern
from transfer.engine import EngineOptions, open_engine

MAX_KNOWN_BYTES = 64 << 20
"""What follows in a larger pool is zero."""


def main(backend: str, pool_bytes: str, secret: str, device: str = "cpu", fault: str | None = None) -> None:
    engine = open_engine(
        backend,
        EngineOptions(
            name=f"serving-{backend}-{os.getpid()}",
            bind_host="127.0.0.1",
            advertise_host="127.0.0.1",
            item_bytes=4,
            fault=fault,
        ),
    )
    engine.admit(bytes.fromhex(secret))
    pool = torch.zeros(int(pool_bytes), dtype=torch.uint8, device=device)
    known = torch.from_numpy(pattern(min(len(pool), MAX_KNOWN_BYTES)))
    pool[: len(known)].copy_(known)
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)
    region = engine.register(pool)
    print(json.dumps({"engine": engine.describe().hex(), "region": region.describe().hex()}), flush=True)
    waits: list[object] = [sys.stdin]
    descriptor = engine.fileno()
    if descriptor is not None:
        waits.append(descriptor)
    while sys.stdin not in select.select(waits, [], [], 0.001 if descriptor is None else 0.05)[0]:
        engine.progress()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
