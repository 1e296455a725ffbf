# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvferry.transfer.backends.nixl.descriptor_lists import DescriptorLists, NixlPoolAddress

OURS = NixlPoolAddress(address=1000, nbytes=640, device=0, kind="DRAM")
THEIRS = NixlPoolAddress(address=5000, nbytes=1280, device=3, kind="VRAM")


@dataclass
class StandInAgent:
    """Records its calls."""

    prepared: list[tuple[str, list[int], str]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def prep_xfer_dlist(self, name: str, rows: np.ndarray, kind: str) -> int:
        self.prepared.append((name, rows[0].tolist(), kind))
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
    lists = DescriptorLists(agent, "peer", OURS, THEIRS)
    assert lists.make_read(spans((64, 256, 128), (320, 0, 64))) == (0, [1, 2, 5], 1, [4, 5, 0])
    assert lists.make_read(spans((0, 640, 64))) == (0, [0], 1, [10])
    assert agent.prepared == [("", [1000, 64, 0, 64, 10], "DRAM"), ("peer", [5000, 64, 3, 64, 20], "VRAM")]
    lists.release()
    assert agent.released == [0, 1]


def test_a_shorter_unit_takes_new_lists_and_a_longer_one_does_not() -> None:
    agent = StandInAgent()
    lists = DescriptorLists(agent, "peer", OURS, THEIRS)
    lists.make_read(spans((0, 256, 256)))
    assert lists.make_read(spans((64, 128, 64))) == (2, [1], 3, [2])
    assert lists.make_read(spans((0, 256, 256))) == (2, [0, 1, 2, 3], 3, [4, 5, 6, 7])
    lists.release()
    assert agent.released == [0, 1, 2, 3], "reads under way may still be made of the first"
