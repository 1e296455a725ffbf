# SPDX-License-Identifier: Apache-2.0
"""Descriptors that wake the transfer thread: for a backend's own threads, and at a time finer than poll's."""

from __future__ import annotations

import ctypes
import os
import threading
import time

_TFD_TIMER_ABSTIME = 1
_NANOSECONDS = 1_000_000_000


class Waker:
    """A descriptor that turns readable. `wake` may come from any thread, even after `close`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        with self._lock:  # the number may belong to another file by now
            if not self._closed:
                os.eventfd_write(self._descriptor, 1)

    def on_ready(self, events: int) -> None:
        self.drain()

    def drain(self) -> None:
        """Make the descriptor unreadable until the next `wake`."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)


class _Setting(ctypes.Structure):
    """`struct itimerspec`: the time between repetitions, none here, and the first time."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class Timer:
    """A descriptor that turns readable at a time (timerfd_create(2); Python has it from 3.13 on)."""

    def __init__(self) -> None:
        """Raises OSError when there are no descriptors left."""
        self._library = ctypes.CDLL(None, use_errno=True)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor: int = self._library.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._at: float | None = None

    def fileno(self) -> int:
        return self._descriptor

    def set(self, at: float | None) -> None:
        """Become readable then (`time.monotonic`), and not before; None for never."""
        if at is None and self._at is None:
            return
        self._at = at
        s, ns = divmod(round(at * _NANOSECONDS), _NANOSECONDS) if at is not None else (0, 0)
        setting = _Setting(0, 0, s, ns)
        self._library.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(setting), None)

    def on_ready(self, events: int) -> None:
        """Nothing to do: it was set to have `progress` called."""

    def close(self) -> None:
        os.close(self._descriptor)
