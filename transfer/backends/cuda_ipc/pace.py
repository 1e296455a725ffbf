# SPDX-License-Identifier: Apache-2.0
"""When to look whether a launch has landed.

CUDA can put a thread to sleep until an event, but its waking took 0.3 to 0.5 ms on the machine where this was
measured, of the 3 ms that a gigabyte takes. So the transfer thread sleeps by the clock, for the time that the
link needs at its best, and then looks at short intervals.
"""

from __future__ import annotations

_LOOK_S, _LATE_SHARE = 20e-6, 0.1
"""Between two looks: at least so long, and so much of the time by which a launch is late."""
_TELLING_BYTES = 64 << 20
"""Less tells more about the launch than about the link."""
_FORGET = 0.995


class Pace:
    """How long launches take at least, learned from those before. They take longer while the model computes.

    All times are `time.monotonic`'s.
    """

    def __init__(self) -> None:
        self._best = 0.0  # bytes per second

    def next_look(self, nbytes: int, begun: float, now: float) -> float:
        """When to look next at a launch that has not landed."""
        first = begun + (nbytes / self._best if self._best else 0.0)
        return max(first, now + max(_LOOK_S, _LATE_SHARE * (now - first)))

    def learn(self, nbytes: int, seconds: float) -> None:
        """A launch took so long, by the device's own clock."""
        if nbytes >= _TELLING_BYTES and seconds > 0:
            self._best = max(_FORGET * self._best, nbytes / seconds)
