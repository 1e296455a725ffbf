# SPDX-License-Identifier: Apache-2.0
"""A streamed answer, from the exchange to the client's connection, and how it is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvferry.proxy import sse
from kvferry.proxy.errors import ProxyError
from kvferry.proxy.exchange.request_log import CLIENT_LEFT, RequestLog
from kvferry.proxy.http.client_connection import ClientReply, Header

AGENT_ERROR = 502
"""What an error event that an agent wrote stands for."""


class Source(Protocol):
    """Where a stream's events come from, and how it is told to wait."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class ClientStream:
    """The client's end of one stream. Its HTTP answer begins with the first events.

    A client that does not take its events makes their source wait (`drawing_from`, `give`), so no more is
    kept for it than what was on its way.
    """

    def __init__(self, reply: ClientReply, record: RequestLog, headers: tuple[Header, ...]) -> None:
        self._reply = reply
        self._record = record
        self._headers = headers
        self._source: Source | None = None
        self._is_taking = asyncio.Event()
        self._is_taking.set()
        self._has_begun = False
        self.wants_timing = False
        """Whether the client asked to be told, in the last event, where the time went."""
        self._status = 200
        self._code: str | None = None
        self._is_served = False
        """Whether the client was given `[DONE]`. Many hang up on it, without waiting for the body to end."""
        reply.paused = self._pause

    @property
    def has_begun(self) -> bool:
        """Whether the client has anything: then a failure can no longer be an HTTP status."""
        return self._has_begun

    def event(self, event: bytes) -> None:
        """Give one event of a token, with as little ado as possible."""
        if self._has_begun and not self.wants_timing:
            self._record.event(event)
            self._reply.write(event)
        else:
            self.write(event)

    def write(self, events: bytes) -> None:
        """Give one or more whole events."""
        if not self._has_begun:
            self._has_begun = True
            timing = (b"server-timing", self._record.server_timing().encode())
            self._reply.begin(200, (*self._headers, timing))
        self._record.events(events)
        if self.wants_timing:
            events = sse.with_legs(events, self._record.leg_seconds())
        if sse.holds_error(events):
            self._status, self._code = AGENT_ERROR, "agent_error"
        self._is_served = events.endswith(sse.DONE)
        self._reply.write(events)

    async def give(self, events: bytes) -> None:
        """`write`, for those who can wait: returns when the client takes what it is given."""
        self.write(events)
        await self._is_taking.wait()

    @contextmanager
    def drawing_from(self, source: Source) -> Iterator[None]:
        """While open, `source` waits whenever the client does not take what it was given."""
        self._source = source
        if not self._is_taking.is_set():
            source.pause()
        try:
            yield
        finally:
            self._source = None

    def end(self) -> None:
        """The stream is over, and its request too."""
        self._reply.end()
        self._record.end(self._status, self._code)

    def fail(self, error: ProxyError) -> None:
        """End a stream that has begun by an error event and `[DONE]`: never one that just ends."""
        self.write(sse.event(error.body()) + sse.DONE)
        self._status, self._code = error.status, error.code
        self.end()

    def abandon(self) -> None:
        """The client has left; one that had it all has been served."""
        if self._is_served:
            self._record.end(self._status, self._code)
        else:
            self._record.end(CLIENT_LEFT, "client_left")

    def _pause(self, paused: bool) -> None:
        if paused:
            self._is_taking.clear()
        else:
            self._is_taking.set()
        if self._source is not None:
            (self._source.pause if paused else self._source.resume)()
