# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank's KV pool."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch


def allocate_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A contiguous pool of zeros, touched, so that memory does not grow later.

    In host memory it is of huge pages where the system grants them on request: a backend that reads another
    process's memory page by page, as NIXL does within a host, is more than twice as fast with them.
    """
    pool = torch.empty(tuple(shape), dtype=dtype, device=device)
    if pool.device.type == "cpu":
        _ask_for_huge_pages(pool.data_ptr(), pool.numel() * pool.element_size())
    return pool.zero_()


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Advice to the kernel on the whole pages of a range, before they are touched. It may be refused."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        madvise(first, end - first, mmap.MADV_HUGEPAGE)
