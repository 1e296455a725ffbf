# SPDX-License-Identifier: Apache-2.0
"""Spans of several reads as one piece of work that the programs of a single kernel share evenly.

All spans laid end to end are one stream of words. Each program copies an equal run of that stream, whatever
the spans' number and lengths, so one long span keeps every program as busy as a thousand short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer.layout import SpanTable

WIDE_BYTES = 16
"""What a GPU thread moves at once where everything is aligned to it."""
ALIGNED_WORD_BYTES = 8

Words = np.ndarray[Any, np.dtype[np.int64]]


class Work:
    """What one launch copies.

    Args:
        parts: Span tables, each with the addresses of the pool it is written to and the one it is read from.
    """

    def __init__(self, parts: Sequence[tuple[SpanTable, int, int]]) -> None:
        addresses = np.concatenate([table + np.array((local, remote, 0)) for table, local, remote in parts])
        self.nbytes = int(addresses[:, 2].sum())
        self.aligned = not int(np.bitwise_or.reduce(addresses, axis=None)) & (WIDE_BYTES - 1)
        self.word_bytes = ALIGNED_WORD_BYTES if self.aligned else 1
        self.num_spans = len(addresses)
        self._addresses = addresses

    def num_programs(self, most: int, words_each: int) -> int:
        """At most so many, and none with less than `words_each` words to copy unless it is the only one."""
        words = self.nbytes // self.word_bytes
        return max(1, min(most, words // words_each))

    def table_size(self, num_programs: int) -> int:
        """Entries of the table for so many programs."""
        return 3 * self.num_spans + 1 + 2 * num_programs + 1

    def write_table(self, table: Words, num_programs: int) -> None:
        """Write what the kernel reads, `table_size` entries, one section after the other.

        starts [num_spans + 1]      each span's first word in the stream, and the stream's length
        sources [num_spans]         addresses
        destinations [num_spans]
        bounds [num_programs + 1]   each program's first word, and the stream's length
        firsts [num_programs]       the span that holds it
        """
        n = self.num_spans
        starts, sources, destinations = table[: n + 1], table[n + 1 : 2 * n + 1], table[2 * n + 1 : 3 * n + 1]
        bounds = table[3 * n + 1 : 3 * n + 2 + num_programs]
        firsts = table[3 * n + 2 + num_programs : self.table_size(num_programs)]
        starts[0] = 0
        np.cumsum(self._addresses[:, 2] // self.word_bytes, out=starts[1:])
        sources[:] = self._addresses[:, 1]
        destinations[:] = self._addresses[:, 0]
        total = int(starts[n])
        # Runs begin at multiples of a wide word, or aligned accesses would not stay so.
        step = WIDE_BYTES // self.word_bytes
        share = -(-total // (num_programs * step)) * step
        np.minimum(np.arange(num_programs + 1) * share, total, out=bounds)
        firsts[:] = np.searchsorted(starts[1:], bounds[:-1], side="right")
        np.minimum(firsts, n - 1, out=firsts)
