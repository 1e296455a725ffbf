# SPDX-License-Identifier: Apache-2.0
"""How long tests wait, on machines that are slower than any on which we serve."""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("KVFERRY_TEST_PATIENCE", "1"))
"""How many times longer than usual; `make test-rdma` sets it for its emulated machine."""


def patient(seconds: float) -> float:
    """A limit that says when to give up, not how fast something has to be."""
    return seconds * PATIENCE
