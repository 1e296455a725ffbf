# SPDX-License-Identifier: Apache-2.0
"""What `--verify-kv` costs, as a part of the pulls that it checks.

    python -m benchmarks.verify_cost

Two transfer planes in one process, pools in host memory, blocks of half the size of Qwen3-8B's. Every
figure is of the best of some rounds: a busy machine only ever adds.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from kvferry.transfer.checksum import PoolSums
from kvferry.transfer.engine import usable
from kvferry.transfer.events import PullDone
from kvferry.transfer.layout import KVGeometry
from kvferry.transfer.memory import own_pool
from kvferry.transfer.plane import one_group
from tests.unit.transfer.rig import NUM_BLOCKS, Agent

GEOMETRY = KVGeometry(
    num_layers=9, num_kv_heads=8, head_dim=128, dtype="float32", block_size=16, rope="default:1000000"
)
BLOCKS = range(NUM_BLOCKS)
MIB = len(BLOCKS) * 8 * GEOMETRY.head_block_bytes / (1 << 20)
ROUNDS = 20


def sum_ms() -> float:
    """One rank's sums of all blocks, alone on its thread."""
    shape = GEOMETRY.pool_shape(len(BLOCKS), 8)
    sums = PoolSums(own_pool(torch.randn(shape), GEOMETRY, 1, 0))
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        sums.sums(BLOCKS)
        best = min(best, time.perf_counter() - begun)
    return best * 1000


async def pull_ms(transfer: str) -> tuple[float, float]:
    """The fastest pull, from its first read to the proof, and how much of that was verification."""
    options: dict[str, Any] = {"transfer": transfer, "geometry": GEOMETRY, "verify_kv": True, "lease_s": 10.0}
    async with Agent(seed=1, **options) as prefill, Agent(seed=2, **options) as decode:
        rounds = []
        tokens = len(BLOCKS) * GEOMETRY.block_size
        for _ in range(ROUNDS):
            transfer_id = prefill.lend(BLOCKS, tokens)
            await asyncio.sleep(0.05)  # the producer's own sums; between requests here, not part of the pull
            before = decode.plane.stats().verify_seconds
            decode.plane.pull(transfer_id, prefill.remote(tokens), one_group(list(reversed(BLOCKS))), 10.0)
            done = await decode.event(PullDone)
            rounds.append((done.pull_s * 1000, (decode.plane.stats().verify_seconds - before) * 1000))
    return min(rounds)


async def main() -> None:
    torch.set_num_threads(1)
    print(f"{len(BLOCKS)} blocks, {MIB:.0f} MiB; sums alone {sum_ms() / MIB:.3f} ms/MiB")
    for transfer in ("tcp", "nixl"):
        if usable(transfer).ok:
            pull, verify = await pull_ms(transfer)
            print(f"{transfer}: pull {pull / MIB:.3f} ms/MiB, of which verification {verify / MIB:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
