# SPDX-License-Identifier: Apache-2.0
"""The kernel of the cuda_ipc backend: the reading GPU fetches spans from another GPU's memory.

One launch serves any number of spans of any number of reads; `cuda_ipc_work.Work` lays its table out. The
addresses are absolute. Triton compiles two forms: 16 bytes a thread where everything is aligned, else bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


# The counts differ from launch to launch: compiled in, each would cost a compilation in the midst of a pull.
@triton.jit(do_not_specialize=["num_spans", "num_programs"])
def gather(table, num_spans, num_programs, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this program's run of the stream, span by span, BLOCK words at once. ALIGNED: words are 8 bytes,
    and go in pairs.
    """
    sources = table + num_spans + 1
    destinations = sources + num_spans
    bounds = destinations + num_spans
    firsts = bounds + num_programs + 1
    program = tl.program_id(0)
    position = tl.load(bounds + program)
    stop = tl.load(bounds + program + 1)
    span = tl.load(firsts + program)
    lanes = tl.arange(0, BLOCK)
    while position < stop:
        start = tl.load(table + span)
        end = tl.minimum(tl.load(table + span + 1), stop)
        if ALIGNED:
            source = tl.load(sources + span).to(tl.pointer_type(tl.int64))
            destination = tl.load(destinations + span).to(tl.pointer_type(tl.int64))
        else:
            source = tl.load(sources + span).to(tl.pointer_type(tl.uint8))
            destination = tl.load(destinations + span).to(tl.pointer_type(tl.uint8))
        at = position - start
        size = end - start
        while at + BLOCK <= size:
            reads = source + at + lanes
            writes = destination + at + lanes
            if ALIGNED:
                reads = tl.multiple_of(reads, 16)
                writes = tl.multiple_of(writes, 16)
            # Nobody reads a word twice: leave the caches to the model.
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
