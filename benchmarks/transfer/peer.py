# SPDX-License-Identifier: Apache-2.0
"""A process that owns a pool of random bytes and lets the benchmark read it, through one backend.

    python -m benchmarks.transfer.peer BACKEND DEVICE POOL_BYTES SEED SECRET_HEX

Prints one line of JSON with its descriptions, then serves until its stdin ends.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

from benchmarks.transfer.pools import random_pool
from kvferry.transfer.engine import EngineOptions, open_engine


def main(backend: str, device: str, pool_bytes: str, seed: str, secret: str) -> None:
    options = EngineOptions(
        name=f"bench-peer-{secret[:8]}", bind_host="127.0.0.1", advertise_host="127.0.0.1"
    )
    engine = open_engine(backend, options)
    engine.admit(bytes.fromhex(secret))
    pool = random_pool(int(pool_bytes), int(seed), device)
    [region] = engine.register([pool])
    print(json.dumps({"engine": engine.describe().hex(), "region": region.describe().hex()}), flush=True)
    descriptor = engine.fileno()
    waits: list[Any] = [sys.stdin] if descriptor is None else [sys.stdin, descriptor]
    while sys.stdin not in select.select(waits, [], [], 0.001 if descriptor is None else 0.05)[0]:
        engine.progress()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
