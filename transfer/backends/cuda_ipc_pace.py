# SPDX-License-Identifier: Apache-2.0
"""When to look whether a launch has landed.

CUDA can put a thread to sleep until an event, but its waking took 0.3 to 0.5 ms on the machine where this was
measured, of the 3 ms that a gigabyte takes. So the transfer thread sleeps by the clock, for most of the time
that the link needs at its best, and then looks at short intervals.
"""

from __future__ import annotations

FIRST_LOOK = 0.97
"""Of the time that a launch takes at best."""
_LOOK_S, _LOOK_SHARE = 20e-6, 0.01
"""Between two looks: at least so long, and so much of the time that has passed."""
_TELLING_BYTES = 64 << 20
"""Less tells more about the launch than about the link."""
_IN_TIME = 0.05
_FORGET, _HURRY = 0.995, 1.05


class Pace:
    """How long launches take at least, learned from those before. They take longer while the model computes.

    All times are `time.monotonic`'s.
    """

    def __init__(self) -> None:
        self._best = 0.0  # bytes per second

    def next_look(self, nbytes: int, begun: float, now: float) -> float:
        """When to look next at a launch that has not landed."""
        first = begun + FIRST_LOOK * nbytes / self._best if self._best else now
        return max(first, now + max(_LOOK_S, _LOOK_SHARE * (now - begun)))

    def learn(self, nbytes: int, begun: float, looked: float, landed: float) -> None:
        """A launch was seen to have landed, and not to have at the look before that."""
        if nbytes < _TELLING_BYTES:
            return
        if landed - looked < _IN_TIME * (landed - begun):
            self._best = max(_FORGET * self._best, nbytes / (landed - begun))
        else:  # we came late, so the true time is less
            self._best *= _HURRY
