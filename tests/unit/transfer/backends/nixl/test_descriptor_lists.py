# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvferry.transfer.backends.nixl.descriptor_lists import DescriptorLists, NixlRegionAddress
from kvferry.transfer.layout import REGION_SHIFT

OURS = NixlRegionAddress(address=1000, nbytes=640, device=0, kind="DRAM")
THEIRS = NixlRegionAddress(address=5000, nbytes=1280, device=3, kind="VRAM")


@dataclass
class StandInAgent:
    """Records its calls."""

    prepared: list[tuple[str, list[list[int]], str]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def prep_xfer_dlist(self, name: str, rows: np.ndarray, kind: str) -> int:
        self.prepared.append((name, rows.tolist(), kind))
        return len(self.prepared) - 1

    def make_prepped_xfer(
        self, operation: str, local: int, ours: np.ndarray, remote: int, theirs: np.ndarray
    ) -> tuple[object, ...]:
        assert operation == "READ" and ours.dtype == theirs.dtype == np.int32
        return local, ours.tolist(), remote, theirs.tolist()

    def release_dlist_handle(self, handle: int) -> None:
        self.released.append(handle)


def spans(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_lists_are_prepared_once_and_named_by_number() -> None:
    agent = StandInAgent()
    lists = DescriptorLists(agent, "peer", [OURS], [THEIRS])
    assert lists.make_read(spans((64, 256, 128), (320, 0, 64))) == (0, [1, 2, 5], 1, [4, 5, 0])
    assert lists.make_read(spans((0, 640, 64))) == (0, [0], 1, [10])
    assert agent.prepared == [
        ("", [[1000, 64, 0, 64, 10]], "DRAM"),
        ("peer", [[5000, 64, 3, 64, 20]], "VRAM"),
    ]
    lists.release()
    assert agent.released == [0, 1]


def test_a_shorter_unit_takes_new_lists_and_a_longer_one_does_not() -> None:
    agent = StandInAgent()
    lists = DescriptorLists(agent, "peer", [OURS], [THEIRS])
    lists.make_read(spans((0, 256, 256)))
    assert lists.make_read(spans((64, 128, 64))) == (2, [1], 3, [2])
    assert lists.make_read(spans((0, 256, 256))) == (2, [0, 1, 2, 3], 3, [4, 5, 6, 7])
    lists.release()
    assert agent.released == [0, 1, 2, 3], "reads under way may still be made of the first"


def test_units_are_numbered_through_all_regions() -> None:
    """A region's rest that makes no whole unit has no number."""
    agent = StandInAgent()
    more = NixlRegionAddress(address=9000, nbytes=100, device=3, kind="VRAM")
    lists = DescriptorLists(agent, "peer", [OURS], [more, THEIRS])
    rows = spans((64, 1 << REGION_SHIFT, 64), (128, 32, 64), (0, (1 << REGION_SHIFT) + 32, 32))
    assert lists.make_read(rows) == (0, [2, 3, 4, 5, 0], 1, [3, 4, 1, 2, 4])
    assert agent.prepared[1] == ("peer", [[9000, 32, 3, 32, 3], [5000, 32, 3, 32, 40]], "VRAM")
