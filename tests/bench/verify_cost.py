# SPDX-License-Identifier: Apache-2.0
"""What `--verify-kv` costs, beside the same pulls without it, in one run.

    python -m tests.bench.verify_cost

Two transfer planes in one process, pools in host memory, blocks of half the size of Qwen3-8B's. Every
figure is the best of some rounds: a busy machine only ever adds.
"""

from __future__ import annotations

import asyncio
import time

import torch

from tests.unit.transfer.rig import NUM_BLOCKS, Agent
from transfer.checksum import PoolSums
from transfer.connector import PullDone
from transfer.engine import usable
from transfer.layout import KVGeometry

GEOMETRY = KVGeometry(
    num_layers=9, num_kv_heads=8, head_dim=128, dtype="float32", block_size=16, rope="default:1000000"
)
BLOCKS = range(NUM_BLOCKS)
MIB = len(BLOCKS) * 8 * GEOMETRY.head_block_bytes / (1 << 20)
ROUNDS = 20


def sum_ms() -> float:
    """One rank's sums of all blocks, alone on its thread."""
    shape = GEOMETRY.pool_shape(len(BLOCKS), 8)
    sums = PoolSums(torch.randn(shape), GEOMETRY)
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        sums.sums(BLOCKS)
        best = min(best, time.perf_counter() - begun)
    return best * 1000


async def pull_ms(transfer: str, verify_kv: bool) -> float:
    """From `pull` to the proof, of blocks that are ready to be read."""
    options = {"transfer": transfer, "geometry": GEOMETRY, "verify_kv": verify_kv, "lease_s": 10.0}
    async with Agent(seed=1, **options) as prefill, Agent(seed=2, **options) as decode:
        best = float("inf")
        for _ in range(ROUNDS):
            transfer_id = prefill.lend(BLOCKS, len(BLOCKS) * GEOMETRY.block_size)
            await asyncio.sleep(0.05)  # the producer's sums are made while it prefills
            begun = time.perf_counter()
            remote = prefill.remote(len(BLOCKS) * GEOMETRY.block_size)
            decode.plane.pull(transfer_id, remote, list(reversed(BLOCKS)), 0, 10.0)
            await decode.event(PullDone)
            best = min(best, time.perf_counter() - begun)
    return best * 1000


async def main() -> None:
    torch.set_num_threads(1)
    print(f"{len(BLOCKS)} blocks, {MIB:.0f} MiB; sums alone {sum_ms() / MIB:.3f} ms/MiB")
    for transfer in ("tcp", "nixl"):
        if usable(transfer).ok:
            without, with_sums = await pull_ms(transfer, False), await pull_ms(transfer, True)
            share = 1 - without / with_sums
            print(
                f"{transfer}: {without / MIB:.3f} ms/MiB without, {with_sums / MIB:.3f} with, "
                f"{share:.0%} of the pull is verification"
            )


if __name__ == "__main__":
    asyncio.run(main())
