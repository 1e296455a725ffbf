# SPDX-License-Identifier: Apache-2.0
"""Pools whose every byte is known, on either side of a process boundary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvferry.transfer.layout import REGION_SHIFT


def pattern(nbytes: int) -> npt.NDArray[np.uint8]:
    """The serving side's bytes: pseudo-random, the same in every process."""
    return np.random.default_rng(20261120).integers(0, 256, nbytes, dtype=np.uint8)


def allocations(pool: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The pool itself, or its bytes in so many allocations of equal size, in order of address."""
    if count == 1:
        return [pool]
    pieces = sorted((torch.empty_like(piece) for piece in pool.chunk(count)), key=torch.Tensor.data_ptr)
    for piece, source in zip(pieces, pool.chunk(count), strict=True):
        piece.copy_(source)
    return pieces


def virtual(offsets: npt.NDArray[np.int64], region_bytes: int) -> npt.NDArray[np.int64]:
    """Offsets into a pool as virtual ones into its allocations of so many bytes."""
    return ((offsets // region_bytes) << REGION_SHIFT) + offsets % region_bytes
