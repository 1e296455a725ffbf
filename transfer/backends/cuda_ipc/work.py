# SPDX-License-Identifier: Apache-2.0
"""The copies of one launch: spans of several reads, for a kernel whose programs share them evenly, for the
copy engines, or for both.

The kernel's spans laid end to end are one stream of words. Each program copies an equal run of that stream,
whatever the spans' number and lengths, so one long span keeps every program as busy as a thousand short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WIDE_BYTES = 16
"""Bytes that a GPU thread moves at once where everything is aligned to it."""
ALIGNED_WORD_BYTES = 8

Words = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How to launch a table: the number of programs, and whether accesses are wide or byte by byte."""

    num_programs: int
    aligned: bool


class Work:
    """The copies of one launch.

    Args:
        parts: Spans by address: destination, source and length, [n, 3] each.
    """

    def __init__(self, parts: Sequence[Words]) -> None:
        self.num_spans = sum(len(spans) for spans in parts)
        self.nbytes = sum(int(spans[:, 2].sum()) for spans in parts)
        self._parts = parts

    def table_size(self, num_gathered: int) -> int:
        """Entries of a table whose first `num_gathered` spans are the kernel's."""
        return 2 + num_gathered + 3 * self.num_spans

    def spans(self, table: Words, num_gathered: int) -> Words:
        """The table's last section: destination, source and length, [num_spans, 3]."""
        return table[num_gathered + 2 : self.table_size(num_gathered)].reshape(self.num_spans, 3)

    def write_table(self, table: Words, num_gathered: int, most_programs: int, words_each: int) -> Shape:
        """Write what the kernel reads to copy the first `num_gathered` spans, and all spans: `table_size`
        entries, one section after the other.

        share [1]                   words that each program copies; the last of them fewer
        starts [num_gathered + 1]   each span's first byte in the stream, and the stream's length
        spans [num_spans, 3]        destination, source (addresses) and length in bytes

        At most `most_programs`, none of which has less than `words_each` words to copy unless it is the only
        one. A launch waits for this, on a CPU whose caches a sleep has emptied, so it makes few calls.
        """
        n = num_gathered
        starts, spans = table[1 : n + 2], self.spans(table, n)
        np.concatenate(self._parts, out=spans)
        starts[0] = 0
        np.cumsum(spans[:n, 2], out=starts[1:])
        aligned = not int(np.bitwise_or.reduce(table[1 : 2 + 4 * n])) & (WIDE_BYTES - 1)
        word_bytes = ALIGNED_WORD_BYTES if aligned else 1
        words = int(starts[n]) // word_bytes
        num_programs = max(1, min(most_programs, words // words_each))
        # Runs begin at multiples of a wide word, or aligned accesses would not stay so.
        step = WIDE_BYTES // word_bytes
        table[0] = -(-words // (num_programs * step)) * step
        return Shape(num_programs, aligned)
