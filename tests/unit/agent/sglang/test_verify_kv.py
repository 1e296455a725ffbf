# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np

from kvferry.agent.sglang.server import HeadShare, pool_of
from kvferry.transfer.checksum import PoolSums
from tests.unit.agent.sglang.test_conn import HEADS, NUM_PAGES, Memory


def test_a_flipped_bit_changes_the_sum_of_its_page_and_head_alone() -> None:
    """In any layer's K or V."""
    memory = Memory()
    memory.pages[:] = np.random.default_rng(0).integers(0, 256, memory.pages.shape)
    sums = PoolSums(pool_of(memory, "cpu", HeadShare.of(memory, 0, 1, HEADS)))
    before = sums.sums(0, range(NUM_PAGES))
    for buffer in range(len(memory.pages)):
        memory.pages[buffer, 3, 1, 2, 5] ^= 0x40
        assert np.argwhere(sums.sums(0, range(NUM_PAGES)) != before).tolist() == [[3, 2]]
        memory.pages[buffer, 3, 1, 2, 5] ^= 0x40
