# SPDX-License-Identifier: Apache-2.0
"""Pools whose every byte is known, on either side of a process boundary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pattern(nbytes: int) -> npt.NDArray[np.uint8]:
    """The serving side's bytes: pseudo-random, the same in every process."""
    return np.random.default_rng(20261120).integers(0, 256, nbytes, dtype=np.uint8)
