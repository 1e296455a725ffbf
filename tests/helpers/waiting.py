# SPDX-License-Identifier: Apache-2.0
"""Waiting for what has no event, and how long tests wait on machines slower than any on which we serve."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable

PATIENCE = float(os.environ.get("KVFERRY_TEST_PATIENCE", "1"))
"""How many times longer than usual; `make test-rdma` sets it for its emulated machine."""


def patient(seconds: float) -> float:
    """A limit that says when to give up, not how fast something has to be."""
    return seconds * PATIENCE


async def until(
    claim: Callable[[], object] | Callable[[], Awaitable[object]],
    timeout_s: float = patient(20.0),
    poll_s: float = 0.002,
) -> None:
    """Poll until a claim, or what it returns to be awaited, is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = claim()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(poll_s)


def wait_until(
    claim: Callable[[], object],
    timeout_s: float = patient(20.0),
    *,
    step: Callable[[], object] = lambda: None,
) -> None:
    """As `until`, where no event loop runs. `step` is called between two looks. Raises AssertionError."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "it did not come true"
        step()
        time.sleep(0.0005)
