# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank's KV pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.transfer.memory import allocate_pool

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds an address (proc(5), smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, end = (int(each, 16) for each in words[0].split("-"))
            inside = first <= address < end
        elif inside and words[0] == "VmFlags:":
            return set(words[1:])
    raise AssertionError(f"no mapping holds {address:#x}")


def test_a_pool_is_zero_and_contiguous() -> None:
    pool = allocate_pool((3, 2, 1, 2, 4, 8), torch.bfloat16, "cpu")
    assert (tuple(pool.shape), pool.dtype) == ((3, 2, 1, 2, 4, 8), torch.bfloat16)
    assert pool.is_contiguous()
    assert not pool.any()


@pytest.mark.skipif(not _HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_a_pool_in_host_memory_asks_for_huge_pages() -> None:
    """With small ones NIXL reads it at 40 % of a plain copy's speed (`make bench-transfer`)."""
    pool = allocate_pool((64 << 20,), torch.uint8, "cpu")
    assert "hg" in flags_of(pool.data_ptr() + (32 << 20))
