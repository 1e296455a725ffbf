# SPDX-License-Identifier: Apache-2.0
"""That a process is to end: how long it may take over what it has, and when it must not wait any longer."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

INTERRUPT_DRAIN_S = 3.0
"""For Ctrl-C: its sender waits."""


class StopRequest:
    """Made by a signal, which is logged, or by `make`. A second signal means: at once.

    Args:
        drain_s: Seconds that draining may take. SIGINT gives `INTERRUPT_DRAIN_S` at most.
    """

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._signals = 0
        self.limit_s = drain_s
        """Seconds that draining may take."""
        self.made = asyncio.Event()
        self.at_once = asyncio.Event()
        """A second signal has come: do not wait any longer."""

    def on_signals(self) -> None:
        """Let SIGTERM and SIGINT make it. Needs a running event loop."""
        loop = asyncio.get_running_loop()
        interrupt_s = min(self._drain_s, INTERRUPT_DRAIN_S)
        loop.add_signal_handler(signal.SIGTERM, self._signalled, self._drain_s, "a second signal")
        loop.add_signal_handler(signal.SIGINT, self._signalled, interrupt_s, "Ctrl-C again")

    def make(self, limit_s: float | None = None) -> None:
        """Let the process drain, and end. Idempotent: the first call sets the limit, if it has one."""
        if limit_s is not None and not self.made.is_set():
            self.limit_s = limit_s
        self.made.set()

    async def drain(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work of draining until it is done, the limit has passed, or `at_once`. Returns whether it is
        done. Raises what it raises.
        """
        waits = [asyncio.ensure_future(each) for each in (work, self.at_once.wait())]
        try:
            done, _ = await asyncio.wait(waits, timeout=self.limit_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()
        return waits[0] in done

    def _signalled(self, limit_s: float, again: str) -> None:
        self._signals += 1
        if self._signals > 1:
            log.info("stopping at once")
            self.at_once.set()
        else:
            log.info("stopping: what runs has %g s to finish; %s stops at once", limit_s, again)
        self.make(limit_s)
