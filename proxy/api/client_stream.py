# SPDX-License-Identifier: Apache-2.0
"""A streamed response: from the exchange to the client's connection, accounting, back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvferry.proxy import sse
from kvferry.proxy.errors import ProxyError
from kvferry.proxy.exchange.request_log import CLIENT_LEFT, RequestLog
from kvferry.proxy.http.client_connection import ClientResponse, Header

AGENT_ERROR = 502
"""The status logged for an error event that an agent wrote."""


class Pausable(Protocol):
    """A source of events that can be paused."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class ClientStream:
    """The client's end of one stream. The HTTP response starts with the first events.

    A client that does not read pauses the source (`throttling`, `send`), so that the buffer stays bounded.
    """

    def __init__(self, response: ClientResponse, log: RequestLog, headers: tuple[Header, ...]) -> None:
        self._response = response
        self._log = log
        self._headers = headers
        self._source: Pausable | None = None
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self.is_started = False
        """Whether anything was sent: from then on a failure can no longer be an HTTP status."""
        self.include_timing = False
        """Whether the last event reports how long each leg took."""
        self._status = 200
        self._code: str | None = None
        self._is_done = False
        """Whether `[DONE]` was sent. Many clients disconnect on it, without waiting for the body's end."""
        response.on_pause = self._on_pause

    def event(self, event: bytes) -> None:
        """Write one event of a token, by the shortest path."""
        if self.is_started and not self.include_timing:
            self._log.event(event)
            self._response.write(event)
        else:
            self.write(event)

    def write(self, events: bytes) -> None:
        """Write one or more whole events."""
        if not self.is_started:
            self.is_started = True
            timing = (b"server-timing", self._log.server_timing().encode())
            self._response.start(200, (*self._headers, timing))
        self._log.events(events)
        if self.include_timing:
            events = sse.with_leg_times(events, self._log.leg_seconds())
        if sse.has_error(events):
            self._status, self._code = AGENT_ERROR, "agent_error"
        self._is_done = events.endswith(sse.DONE)
        self._response.write(events)

    async def send(self, events: bytes) -> None:
        """Write whole events, and wait while the client does not read."""
        self.write(events)
        await self._is_writable.wait()

    @contextmanager
    def throttling(self, source: Pausable) -> Iterator[None]:
        """While open, pause `source` whenever the client does not read."""
        self._source = source
        if not self._is_writable.is_set():
            source.pause()
        try:
            yield
        finally:
            self._source = None

    def end(self) -> None:
        """End the stream and its request."""
        self._response.end()
        self._log.end(self._status, self._code)

    def fail(self, error: ProxyError) -> None:
        """End a started stream by an error event and `[DONE]`."""
        self.write(sse.event(error.body()) + sse.DONE)
        self._status, self._code = error.status, error.code
        self.end()

    def client_left(self) -> None:
        """End the request of a client that has disconnected; after `[DONE]` it counts as served."""
        if self._is_done:
            self._log.end(self._status, self._code)
        else:
            self._log.end(CLIENT_LEFT, "client_left")

    def _on_pause(self, paused: bool) -> None:
        if paused:
            self._is_writable.clear()
        else:
            self._is_writable.set()
        if self._source is not None:
            (self._source.pause if paused else self._source.resume)()
