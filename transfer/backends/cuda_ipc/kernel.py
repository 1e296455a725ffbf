# SPDX-License-Identifier: Apache-2.0
"""The kernel of the cuda_ipc backend: the reading GPU copies spans from another GPU's memory.

One launch serves any number of spans of any number of reads; `Work` writes its table. The addresses are
absolute. Triton compiles two forms: 16 bytes a thread where everything is aligned, else bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


# The count differs between launches: specialised, each would cost a compilation in the middle of a pull.
@triton.jit(do_not_specialize=["num_spans"])
def gather(table, num_spans, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this program's run of the stream, span by span, BLOCK words at once. ALIGNED: words are 8 bytes,
    and go in pairs.
    """
    WORD: tl.constexpr = 8 if ALIGNED else 1
    starts = table + 1
    spans = starts + num_spans + 1
    share = tl.load(table)
    position = tl.program_id(0) * share
    stop = tl.minimum(position + share, tl.load(starts + num_spans) // WORD)
    # The last span that begins at or before the run.
    span = num_spans * 0
    after = num_spans
    while after - span > 1:
        middle = (span + after) // 2
        before = tl.load(starts + middle) // WORD <= position
        span = tl.where(before, middle, span)
        after = tl.where(before, after, middle)
    lanes = tl.arange(0, BLOCK)
    while position < stop:
        start = tl.load(starts + span) // WORD
        end = tl.minimum(tl.load(starts + span + 1) // WORD, stop)
        if ALIGNED:
            source = tl.load(spans + 3 * span + 1).to(tl.pointer_type(tl.int64))
            destination = tl.load(spans + 3 * span).to(tl.pointer_type(tl.int64))
        else:
            source = tl.load(spans + 3 * span + 1).to(tl.pointer_type(tl.uint8))
            destination = tl.load(spans + 3 * span).to(tl.pointer_type(tl.uint8))
        at = position - start
        size = end - start
        while at + BLOCK <= size:
            reads = source + at + lanes
            writes = destination + at + lanes
            if ALIGNED:
                reads = tl.multiple_of(reads, 16)
                writes = tl.multiple_of(writes, 16)
            # No word is read twice: leave the caches to the model.
            tl.store(writes, tl.load(reads, eviction_policy="evict_first"), eviction_policy="evict_first")
            at += BLOCK
        if at < size:
            inside = at + lanes < size
            reads = source + at + lanes
            writes = destination + at + lanes
            if ALIGNED:
                inside = tl.max_constancy(inside, 2)
                reads = tl.multiple_of(reads, 16)
                writes = tl.multiple_of(writes, 16)
            words = tl.load(reads, mask=inside, eviction_policy="evict_first")
            tl.store(writes, words, mask=inside, eviction_policy="evict_first")
        position = end
        span += 1
