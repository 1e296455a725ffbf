# SPDX-License-Identifier: Apache-2.0
"""The clock of deadlines and ages."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Return the running event loop's time, in seconds from some moment on."""
    return asyncio.get_running_loop().time()
