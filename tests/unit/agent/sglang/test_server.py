# SPDX-License-Identifier: Apache-2.0
"""Which part of the KV a rank has, and where the rest lies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.agent.plugin.settings import NotServed
from kvferry.agent.sglang.server import HeadShare, geometry_of
from tests.unit.agent.sglang.test_conn import HEADS, Memory

MODEL = SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=dict))


def share(rank: int, num_ranks: int, total: int) -> HeadShare:
    return HeadShare(rank=rank, num_ranks=num_ranks, total=total)


@pytest.mark.parametrize(
    ("ours", "theirs", "sources"),
    [
        (share(0, 1, 4), 2, {0: [0, 1], 1: [2, 3]}),
        (share(1, 2, 4), 1, {0: [2, 3]}),
        (share(1, 2, 4), 4, {2: [2], 3: [3]}),
        (share(3, 4, 2), 2, {1: [1]}),  # a head at two of our ranks
        (share(0, 1, 2), 4, {0: [0], 1: [], 2: [1], 3: []}),  # and at two of theirs
        (share(0, 1, 1), 2, {0: [0], 1: []}),
        (share(1, 2, 1), 1, {0: [0]}),
    ],
)
def test_each_head_is_read_from_one_rank(ours: HeadShare, theirs: int, sources: dict[int, list[int]]) -> None:
    assert {rank: list(heads) for rank, heads in ours.sources(theirs).items()} == sources


@pytest.mark.parametrize(("ours", "theirs"), [(share(0, 2, 6), 3), (share(1, 3, 6), 2), (share(0, 1, 4), 3)])
def test_ranks_that_do_not_pair_are_refused(ours: HeadShare, theirs: int) -> None:
    with pytest.raises(ValueError):
        ours.sources(theirs)


def test_heads_that_are_not_split_evenly_are_refused() -> None:
    with pytest.raises(NotServed, match="4 KV heads cannot be split over 3 ranks"):
        HeadShare.of(Memory(), 0, 3, HEADS)


def test_the_geometry_does_not_depend_on_the_ranks_unless_pages_are_not_split() -> None:
    def geometries(page_size: int) -> set[str]:
        found = set()
        for rank, num_ranks in ((0, 1), (0, 2), (1, 2)):
            memory = Memory(HEADS // num_ranks)
            memory.kv_item_lens = [page_size * HEADS // num_ranks * 8] * 4
            memory.page_size = page_size
            ours = HeadShare.of(memory, rank, num_ranks, HEADS)
            found.add(geometry_of(memory, MODEL, version="1", share=ours).fingerprint())
        return found

    assert len(geometries(16)) == 1
    assert len(geometries(1 << 13)) == 3, "a page of 131,072 runs is not split"
