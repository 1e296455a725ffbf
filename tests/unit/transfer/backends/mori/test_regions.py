# SPDX-License-Identifier: Apache-2.0
"""Spans that lie in pools of several regions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.backends.mori.regions import PieceMap, by_pieces, piece_bytes

SPANS = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(1, 200)), min_size=0, max_size=20
)


@given(SPANS, st.integers(1, 300), st.integers(1, 300))
def test_every_byte_is_read_once_and_no_piece_leaves_its_regions(
    spans: list[tuple[int, int, int]], local_region: int, remote_region: int
) -> None:
    """Byte by byte, whatever the regions' sizes."""
    table = np.array(spans, dtype=np.int64).reshape(-1, 3)
    pieces = []
    maps = PieceMap([1000], local_region), PieceMap([1000], remote_region)
    for ours, theirs, rows in by_pieces(table, *maps):
        for local, remote, nbytes in rows.tolist():
            assert 0 <= local < local + nbytes <= local_region
            assert 0 <= remote < remote + nbytes <= remote_region
            pieces += [
                (ours * local_region + local + byte, theirs * remote_region + remote + byte)
                for byte in range(nbytes)
            ]
    whole = [(local + byte, remote + byte) for local, remote, nbytes in spans for byte in range(nbytes)]
    assert sorted(pieces) == sorted(whole)


def test_one_region_on_either_side_leaves_the_spans_as_they_are() -> None:
    table = np.array([[0, 64, 32], [96, 0, 32]], dtype=np.int64)
    ((ours, theirs, rows),) = by_pieces(table, PieceMap([128], 1 << 30), PieceMap([128], 1 << 30))
    assert (ours, theirs) == (0, 0)
    assert np.array_equal(rows, table)


def test_regions_end_at_block_boundaries() -> None:
    assert piece_bytes(2_359_296, 1 << 30) == 455 * 2_359_296
    assert piece_bytes(7, 20) == 14
    with pytest.raises(ValueError, match="a block of 21 bytes"):
        piece_bytes(21, 20)
