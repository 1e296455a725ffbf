# SPDX-License-Identifier: Apache-2.0
"""Both ends of an nccl read must come to the same messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.transfer.backends.nccl.wire import HEAD_BYTES, pack_head, split, tag

pieces = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 50)), max_size=30)


@given(pieces, st.integers(1, 40))
def test_parts_hold_the_stream_in_order_and_none_but_the_last_has_room(
    stream: list[tuple[int, int]], limit: int
) -> None:
    parts = split(stream, limit)
    flat = [offset + i for part in parts for offset, length in part for i in range(length)]
    assert flat == [offset + i for offset, length in stream for i in range(length)]
    sizes = [sum(length for _, length in part) for part in parts]
    assert all(size == limit for size in sizes[:-1])
    assert all(0 < size <= limit for size in sizes)


@given(pieces, st.integers(0, 1 << 40), st.integers(1, 40))
def test_both_pools_are_cut_at_the_same_bytes(stream: list[tuple[int, int]], shift: int, limit: int) -> None:
    elsewhere = [(offset + shift, length) for offset, length in stream]
    sizes = [[length for _, length in part] for part in split(stream, limit)]
    assert sizes == [[length for _, length in part] for part in split(elsewhere, limit)]


def test_heads_and_tags_differ_with_the_read_and_with_the_part() -> None:
    """L10: a message says which read it is of, and which part."""
    one, other = b"\1" * 16, b"\2" * 16
    heads = {pack_head(one, 0, 8), pack_head(one, 1, 8), pack_head(other, 0, 8), pack_head(one, 0, 9)}
    assert len(heads) == 4
    assert {len(head) for head in heads} == {HEAD_BYTES}
    assert len({tag(one, 0), tag(one, 1), tag(other, 0)}) == 3
