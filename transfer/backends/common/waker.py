# SPDX-License-Identifier: Apache-2.0
"""How a backend's own threads tell the transfer thread that `progress` has work."""

from __future__ import annotations

import os
import threading


class Waker:
    """A descriptor that turns readable. `wake` may come from any thread, even after `close`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        with self._lock:  # or the number might be another file's by now
            if not self._closed:
                os.eventfd_write(self._descriptor, 1)

    def drain(self) -> None:
        """Make the descriptor silent until the next `wake`."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)
