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
from kvferry.transfer.layout import KVGeometry, LayerView
from kvferry.transfer.memory import KVPool, own_pool, pool_of_layers
from kvferry.transfer.plane import one_group
from tests.unit.transfer.rig import NUM_BLOCKS, Agent

GEOMETRY = KVGeometry(
    num_layers=9, num_kv_heads=8, head_dim=128, dtype="float32", block_size=16, rope="default:1000000"
)
BLOCKS = range(NUM_BLOCKS)
MIB = len(BLOCKS) * 8 * GEOMETRY.head_block_bytes / (1 << 20)
ROUNDS = 20


def own() -> KVPool:
    """As our own agent's rank has it."""
    return own_pool(torch.randn(GEOMETRY.pool_shape(len(BLOCKS), 8)), GEOMETRY, 1, 0)


def of_layers() -> KVPool:
    """As vLLM has it on CPUs: an allocation for each layer, K beside V."""
    shape = (len(BLOCKS), 8, GEOMETRY.block_size, 2 * GEOMETRY.head_dim)
    layers = (torch.randn(shape) for _ in range(GEOMETRY.num_layers))
    views = [LayerView(b"%d" % number, layer, 1, range(8), 8) for number, layer in enumerate(layers)]
    return pool_of_layers([views], len(BLOCKS))


def sum_ms(pool: KVPool) -> float:
    """One rank's sums of all blocks, alone on its thread."""
    sums = PoolSums(pool)
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        sums.sums(0, BLOCKS)
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
    print(f"{len(BLOCKS)} blocks, {MIB:.0f} MiB")
    for name, pool in (("our agent", own()), ("vLLM", of_layers())):
        print(f"sums alone, pool of {name}: {sum_ms(pool) / MIB:.3f} ms/MiB")
    for transfer in ("tcp", "nixl"):
        if usable(transfer).ok:
            pull, verify = await pull_ms(transfer)
            print(f"{transfer}: pull {pull / MIB:.3f} ms/MiB, of which verification {verify / MIB:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
