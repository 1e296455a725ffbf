# SPDX-License-Identifier: Apache-2.0
"""The models of servers whose pings do not name any (ATOM's, MoRIIO's): asked of each over HTTP.

Their pings come from a process or thread of their own and prove little, so whether the server answers is also
what decides about its state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from proxy.errors import ProxyError
from proxy.upstream import Upstream
from proxy.wire import Register

logger = logging.getLogger(__name__)

ASK_EVERY_S = 5.0
ASK_TIMEOUT_S = 3.0
MAX_KNOWN = 4096
MAX_ASKING = 64


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


@dataclass(slots=True)
class _Known:
    asked_at: float
    model: _Model | None = None


class Introductions:
    """Completes registrations, and owns the questions that are on their way.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream = upstream
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asking: set[asyncio.Task[None]] = set()

    def complete(self, info: Register) -> Register:
        """The registration with the model's name and context; `starting` until the server has told them.

        Returns at once. Needs a running event loop.
        """
        known = self._known.get(info.address)
        if known is None or self._clock() - known.asked_at >= ASK_EVERY_S:
            self._ask(info)
        if known is None or known.model is None:
            return msgspec.structs.replace(info, state="starting")
        length = known.model.max_model_len or 0
        return msgspec.structs.replace(info, model=known.model.id, max_model_len=length)

    async def close(self) -> None:
        """Take back the questions that nobody has answered."""
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking)

    def _ask(self, info: Register) -> None:
        if len(self._asking) >= MAX_ASKING:
            return
        self._known.setdefault(info.address, _Known(0.0)).asked_at = self._clock()
        self._known.move_to_end(info.address)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self._learn(info))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _learn(self, info: Register) -> None:
        by = asyncio.get_running_loop().time() + ASK_TIMEOUT_S
        model: _Model | None = None
        try:
            raw = await self._upstream.get(info, f"{info.address}/v1/models", by=by)
            model = next(iter(msgspec.json.decode(raw, type=_Models).data), None)
        except (ProxyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.info("%s does not say which model it serves: %s", info.address, error)
        if (known := self._known.get(info.address)) is not None:
            known.model = model
