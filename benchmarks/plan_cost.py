# SPDX-License-Identifier: Apache-2.0
"""What it costs to plan the read of one prompt whose KV is in several KV-cache groups.

    python -m benchmarks.plan_cost

From the grant of the producer to the spans that a rank gets: `Pull.opened`, then the `BlockTemplate` of each
group. One rank on both sides, a prompt of 8,192 tokens in blocks of 16, and 48 layers in 4 groups that share
one pool, as in vLLM: the layers of a block next to each other (BLHNC), or each layer by itself (LBHNC).
Blocks are scattered, so none merge. Figures are of CPU time, as other processes may run: the median and the
best of some rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from kvferry.transfer.consumer.pull import Pull, ReadBlocks
from kvferry.transfer.control.messages import Grant
from kvferry.transfer.ids import TransferId
from kvferry.transfer.layout import (
    REGION_SHIFT,
    Layers,
    Placement,
    ReadPlan,
    SpanTable,
    pair_blocks,
    plan_reads,
)
from kvferry.transfer.plane import BlockRun, all_blocks
from kvferry.transfer.ranks.messages import Read, decode_command, encode, pack_blocks, unpack_blocks

TOKENS = 8192
BLOCK_TOKENS = 16
GROUPS = 4
LAYERS = 12
"""Of one group."""
HEADS = 8
HEAD_BYTES = BLOCK_TOKENS * 2 * 128 * 2
"""A head's K and V of one block, 128 wide, bfloat16."""
NUM_BLOCKS = 8192
WINDOW_BLOCKS = 65
"""Of a window of 1,024 tokens."""
ROUNDS = 200


def placement(*, block_outermost: bool) -> Placement:
    layer = HEADS * HEAD_BYTES
    groups = []
    for group in range(GROUPS):
        offsets = [number * layer if block_outermost else number << REGION_SHIFT for number in range(LAYERS)]
        layers = Layers(
            names=tuple(f"{group}.{number}".encode() for number in range(LAYERS)),
            offsets=tuple(offsets),
            block_stride=layer * (LAYERS if block_outermost else 1),
            num_heads=HEADS,
            heads_start=0,
            total_heads=HEADS,
            head_stride=HEAD_BYTES,
            planes=1,
            plane_stride=0,
            unit_bytes=HEAD_BYTES,
        )
        groups.append((layers,))
    sizes = [NUM_BLOCKS * layer * LAYERS] if block_outermost else [NUM_BLOCKS * layer] * LAYERS
    return Placement(regions=tuple(sizes), num_blocks=NUM_BLOCKS, groups=tuple(groups))


def runs(rng: random.Random, kept: Sequence[int]) -> tuple[BlockRun, ...]:
    """A run for each group of so many scattered blocks, up to the prompt's end."""
    end = TOKENS // BLOCK_TOKENS
    return tuple(BlockRun(end - count, tuple(rng.sample(range(1, NUM_BLOCKS), count))) for count in kept)


def plan(read_plan: ReadPlan, ours: tuple[BlockRun, ...], grant: Grant) -> list[SpanTable]:
    """Return the spans by group."""
    pull = Pull(TransferId("p"), TOKENS)
    pull.start(0.0, ours, None)
    pull.connected("tcp")
    [read] = [each for each in pull.opened(0.0, grant) if isinstance(each, ReadBlocks)]
    blocks = {each.group: pair_blocks(each.local_blocks, each.remote_blocks) for each in read.groups}
    command = Read(link=1, transfer_id="p", seq=0, blocks=pack_blocks(blocks), timeout_s=1.0)
    received = decode_command(encode(command))
    assert isinstance(received, Read), "another command than was sent"
    blocks = unpack_blocks(received.blocks)
    return [each.spans(blocks[group]) for group, each in read_plan[0].items()]


def measure(kept: Sequence[int], *, block_outermost: bool) -> tuple[float, float, int]:
    """Median and best milliseconds of CPU time, and how many spans there are."""
    rng = random.Random(7)
    pool = placement(block_outermost=block_outermost)
    [read_plan] = plan_reads([pool], [pool])
    ours, theirs = runs(rng, kept), runs(rng, kept)
    grant = Grant(
        ready=True,
        first_block=0,
        block_ids=all_blocks(theirs),
        num_tokens=TOKENS,
        ids_hash="",
        groups=tuple((run.first, len(run.ids)) for run in theirs),
    )
    took = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        spans = plan(read_plan, ours, grant)
        took.append((time.thread_time() - begun) * 1000)
    return statistics.median(took), min(took), sum(map(len, spans))


def main() -> None:
    end = TOKENS // BLOCK_TOKENS
    kinds = {
        "one group keeps all, three a window of 1,024": (end, WINDOW_BLOCKS, WINDOW_BLOCKS, WINDOW_BLOCKS),
        "four keep all": (end,) * GROUPS,
    }
    print(f"a prompt of {TOKENS} tokens in {GROUPS} groups, {GROUPS * LAYERS} layers")
    for name, kept in kinds.items():
        for order, block_outermost in (("BLHNC", True), ("LBHNC", False)):
            median, best, spans = measure(kept, block_outermost=block_outermost)
            print(f"{name}, {order}: {spans} spans, median {median:.3f} ms of CPU, best {best:.3f}")


if __name__ == "__main__":
    main()
