# SPDX-License-Identifier: Apache-2.0
"""What other engines' pings (ATOM's, MoRIIO's) leave out, model, context and load, from looks at the servers.

Such pings come from a process or thread of their own and prove little, so whether a look shows the server
healthy is also what decides about its state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from kvferry.proxy.discovery.health_probe import EngineDown, ProbeResult, look
from kvferry.proxy.wire.messages import Register

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
MAX_KNOWN = 4096
MAX_LOOKING = 64


@dataclass(slots=True)
class _Known:
    looked_at: float
    sighting: ProbeResult | None = None
    steps: int = 0


class PingedServers:
    """Completes registrations, and owns the looks that are on their way.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, http: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
        self._http = http
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._looking: set[asyncio.Task[None]] = set()

    def complete(self, info: Register) -> Register:
        """The registration with what the last look has shown; `starting` unless that was a healthy server.

        Returns at once. Needs a running event loop.
        """
        known = self._known.get(info.address)
        if known is None or self._clock() - known.looked_at >= LOOK_EVERY_S:
            self._look(info.address)
        if known is None or known.sighting is None:
            return msgspec.structs.replace(info, state="starting")
        shown = known.sighting
        return msgspec.structs.replace(
            info, model=shown.model, max_model_len=shown.max_model_len, load=shown.load, steps=known.steps
        )

    async def close(self) -> None:
        """Take back the looks that have not ended."""
        for task in self._looking:
            task.cancel()
        if self._looking:
            await asyncio.wait(self._looking)

    def _look(self, address: str) -> None:
        if len(self._looking) >= MAX_LOOKING:
            return
        known = self._known.setdefault(address, _Known(0.0))
        known.looked_at = self._clock()
        self._known.move_to_end(address)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self._learn(address, known))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _learn(self, address: str, known: _Known) -> None:
        try:
            known.sighting = await look(self._http, address)
        except EngineDown as down:
            logger.info("%s pings, but %s", address, down)
            known.sighting = None
        except Exception:
            logger.exception("%s could not be looked at, by a defect of ours", address)
            known.sighting = None
        else:
            # One that does not tell its steps is never taken for stalled.
            known.steps = known.sighting.steps if known.sighting.steps is not None else known.steps + 1
