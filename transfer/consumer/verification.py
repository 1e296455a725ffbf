# SPDX-License-Identifier: Apache-2.0
"""Compares what a consumer's ranks hold with the checksums that the producer's ranks made of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.transfer.checksum import SUM_BYTES, SumTable, unpack_sums


def rows(packed: bytes, columns: int) -> tuple[bytes, ...]:
    """Cut a producer's checksums into one row of so many columns per block; no rows if that leaves a rest."""
    width = columns * SUM_BYTES
    if len(packed) % width:
        return ()
    return tuple(packed[start : start + width] for start in range(0, len(packed), width))


def flaw(ours: SumTable, theirs: Sequence[bytes], local_blocks: Sequence[int], columns: Sequence[int]) -> str:
    """Where what landed differs from what was lent; empty if nowhere.

    Our column i must equal the producer's `columns[i]` (`layout.source_columns`).
    """
    table = unpack_sums(b"".join(theirs), len(theirs))
    differing = np.argwhere(ours != table[:, list(columns)])
    if not len(differing):
        return ""
    row, column = differing[0]
    return f"{len(differing)} of {ours.size} slices differ, first block {local_blocks[row]}, head {column}"
