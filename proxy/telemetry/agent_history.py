# SPDX-License-Identifier: Apache-2.0
"""The last hour of each agent as its pings say, for the operator's page: KV use, what runs and what waits.

Of each slice the first ping is stored, into arrays that are made once per agent: most pings cost next to
nothing. In bounded memory: 3 KB an agent.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvferry.proxy.telemetry.history import HOUR_SLICE_S, NUM_HOUR_SLICES, NUM_SLICES, SLICE_S
from kvferry.proxy.wire.registration import Bye, Incarnation, Load, Register

MAX_AGENTS = 4096
_VALUES = ("running", "waiting", "kv_used", "kv_leased")


class _Window:
    """One agent's latest slices: of each, what the first ping in it said; nothing where none came."""

    __slots__ = ("_newest", "_num", "_rows", "_slice_s")

    def __init__(self, slice_s: float, num_slices: int) -> None:
        self._slice_s = slice_s
        self._num = num_slices
        self._rows = array("f", [math.nan]) * (num_slices * len(_VALUES))
        self._newest = 0
        """The number of the slice that was written last."""

    def put(self, now: float, load: Load) -> None:
        number = int(now / self._slice_s)
        if number == self._newest:
            return
        if number > self._newest + 1:
            self._clear(self._newest + 1, number)
        self._newest = number
        start = number % self._num * len(_VALUES)
        self._rows[start : start + len(_VALUES)] = _row(load)

    def _clear(self, first: int, end: int) -> None:
        """Forget slices in which no ping came."""
        for number in range(max(first, end - self._num), end):
            start = number % self._num * len(_VALUES)
            self._rows[start : start + len(_VALUES)] = _NOTHING

    def charts(self, now: float) -> dict[str, Any]:
        """Return a value, or None, per slice, oldest first."""
        last = int(now / self._slice_s)
        starts = [
            number % self._num * len(_VALUES) if number <= self._newest else None
            for number in range(last - self._num + 1, last + 1)
        ]
        return {
            "slice_s": self._slice_s,
            **{
                name: [None if start is None else _shown(self._rows[start + offset]) for start in starts]
                for offset, name in enumerate(_VALUES)
            },
        }


_NOTHING = array("f", [math.nan] * len(_VALUES))


class AgentHistories:
    """The histories of the agents that pinged last.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._agents: OrderedDict[Incarnation, tuple[_Window, _Window]] = OrderedDict()
        """Who has not pinged for longest is first."""

    def note(self, update: Register | Bye) -> None:
        """Take what a ping says."""
        if isinstance(update, Bye):
            return
        windows = self._agents.get(update.incarnation)
        if windows is None:
            windows = _Window(SLICE_S, NUM_SLICES), _Window(HOUR_SLICE_S, NUM_HOUR_SLICES)
            self._agents[update.incarnation] = windows
            if len(self._agents) > MAX_AGENTS:
                self._agents.popitem(last=False)
        else:
            self._agents.move_to_end(update.incarnation)
        now = self._clock()
        for window in windows:
            window.put(now, update.load)

    def charts(self, agent: Incarnation) -> dict[str, Any]:
        """Return an agent's windows, named as those of `History` are; none of one that is not remembered."""
        windows, now = self._agents.get(agent), self._clock()
        if windows is None:
            return {}
        return dict(zip(("charts", "hour"), (window.charts(now) for window in windows), strict=True))


def _row(load: Load) -> array[float]:
    total = load.kv_blocks_total
    used, leased = total - load.kv_blocks_free, load.kv_blocks_leased
    shares = (used / total, leased / total) if total > 0 else (math.nan, math.nan)
    return array("f", (load.running, load.waiting, *shares))


def _shown(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
