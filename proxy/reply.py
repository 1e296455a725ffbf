# SPDX-License-Identifier: Apache-2.0
"""The body of a streamed answer, from the exchange to the client's socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType

from quart.wrappers.response import ResponseBody

from proxy import sse
from proxy.errors import ProxyError
from proxy.record import CLIENT_LEFT, Record

CUT_GRACE_S = 10.0


class EventStream(ResponseBody):
    """An answer's events, the first of which is already here.

    A failure on the way becomes an error event and `[DONE]`: never a stream that just ends. Quart leaves the
    context however the answer ends, also when the client has left; that closes the exchange. A client that
    has not taken its answer `CUT_GRACE_S` after the exchange's deadline is cut off.
    """

    def __init__(
        self, first: bytes, later: AsyncGenerator[bytes, None], record: Record, deadline: float
    ) -> None:
        self._first = first
        self._later = later
        self._record = record
        self._cut = asyncio.timeout_at(deadline + CUT_GRACE_S)
        self._status = 200
        self._code: str | None = None
        self._served = False
        """Whether the client was given `[DONE]`. Many hang up on it, without waiting for the body to end."""

    async def __aenter__(self) -> AsyncGenerator[bytes, None]:
        await self._cut.__aenter__()
        return self._events()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._later.aclose()
        finally:
            if error is None or self._served:
                self._record.end(self._status, self._code)
            else:
                self._record.end(CLIENT_LEFT, "client_left")
            await self._cut.__aexit__(kind, error, trace)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self._record.events(self._first)
        yield self._first
        try:
            async for events in self._later:
                self._record.events(events)
                if sse.holds_error(events):
                    self._status, self._code = 502, "agent_error"
                self._served = events.endswith(sse.DONE)
                yield events
        except ProxyError as error:
            self._status, self._code = error.status, error.code
            yield sse.event(error.body()) + sse.DONE
