# SPDX-License-Identifier: Apache-2.0
"""One client's response: from the exchange to the client's connection, accounting, back-pressure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from kvferry.common.http.server import Header
from kvferry.proxy import sse
from kvferry.proxy.api.translations import messages
from kvferry.proxy.errors import AgentError, ProxyError, agent_error
from kvferry.proxy.exchange.legs import PausableSource
from kvferry.proxy.http.client_connection import ClientResponse
from kvferry.proxy.ids import RequestId
from kvferry.proxy.request import ClientRequest, ReportedUsage, reported_usage, with_usage
from kvferry.proxy.telemetry.metrics import CLIENT_LEFT
from kvferry.proxy.telemetry.request_log import RequestLog

STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", sse.CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
)


class ResponseRewriter(Protocol):
    """How the answer to one request is written where it is not OpenAI's."""

    def whole(self, body: bytes) -> bytes:
        """Rewrite an answer that is not streamed. Raises `BadResponse`."""

    def events(self, events: bytes) -> bytes:
        """Rewrite whole events of a stream; the result may be empty. Raises `BadResponse`."""


class ResponseWriter:
    """The client's end of one exchange (`ResponseSink`).

    A stream's HTTP response starts with its first events. A client that does not read pauses the sources
    (`throttling`), so that the buffer stays bounded.
    """

    def __init__(
        self, response: ClientResponse, log: RequestLog, rewriter: ResponseRewriter | None = None
    ) -> None:
        self._response = response
        self._log = log
        self._rewriter = rewriter
        self._sources: list[PausableSource] = []
        self._is_paused = False
        self._whole: tuple[str, bytes] | None = None
        self.usage: ReportedUsage | None = None
        """What the response says of its tokens."""
        self._hides_usage = False
        """Whether the client has not asked for the usage at the end of its stream."""
        self._streams = False
        self.is_started = False
        """Whether anything was sent: from then on a failure can no longer be an HTTP status."""
        self.include_timing = False
        """Whether a stream's last event reports how long each leg took."""
        self._outcome: tuple[int, str | None, str] = (200, None, "")
        """How a stream ends, as it is logged: the status, and an error's code and message."""
        self._is_done = False
        """Whether `[DONE]` was sent. Many clients disconnect on it, without waiting for the body's end."""
        response.on_pause = self._on_pause

    def set_whole(self, content_type: str, body: bytes) -> None:
        """See `ResponseSink`: `end` sends it."""
        self._whole = content_type, body

    def write_event(self, event: bytes) -> None:
        """Write one event of a token, by the shortest path."""
        if not self.is_started or self.include_timing or self._rewriter is not None:
            self.write(event)
        else:
            self._log.event(event)
            self._response.write(event)

    def write(self, events: bytes) -> None:
        """Write one or more whole events."""
        events = self._read_usage(events)
        if not events:
            return
        if not self.is_started:
            self.is_started = True
            self._response.start(200, (*STREAM_HEADERS, *self._headers()))
        self._log.events(events)
        if self.include_timing:
            events = sse.with_leg_times(events, self._log.leg_seconds())
        if sse.has_error(events):
            self._outcome = _outcome(events)
        self._is_done = events.endswith(sse.DONE)
        if self._rewriter is not None:
            events = self._rewriter.events(events)
        if events:
            self._response.write(events)

    @contextmanager
    def throttling(self, source: PausableSource) -> Iterator[None]:
        """While open, pause `source` whenever the client does not read."""
        self._sources.append(source)
        if self._is_paused:
            source.pause()
        try:
            yield
        finally:
            self._sources.remove(source)

    @property
    def num_unprepared(self) -> int:
        """How many bytes `prepare` has to work on."""
        return 0 if self._whole is None else len(self._whole[1])

    def prepare(self) -> None:
        """Make a whole response what `end` is to send. May run in a thread. Raises `BadResponse`."""
        if self._whole is None:
            return
        content_type, body = self._whole
        self.usage = reported_usage(body)
        if self._rewriter is not None:
            self._whole = content_type, self._rewriter.whole(body)

    def end(self) -> None:
        """End the response, or send a whole one (see `prepare`), and end its request."""
        if self._whole is None:
            self._response.end()
            self._log.end(*self._outcome)
            return
        content_type, body = self._whole
        self._log.end(200)
        content = (b"content-type", content_type.encode("latin-1"))
        self._response.send(200, (content, *self._headers()), body)

    def fail(self, error: ProxyError) -> None:
        """End the request by an error: as an HTTP status, or in a started stream as an event and `[DONE]`."""
        if not self.is_started:
            self._log.end(error.status, error.code, error.message)
            send_error(self._response, self._log.request_id, error, self._log.api == "messages")
            return
        self.write(sse.event(error.body()) + sse.DONE)
        self._outcome = error.status, error.code, error.message
        self.end()

    def client_left(self) -> None:
        """End the request of a client that has disconnected; after `[DONE]` it counts as served."""
        if self._is_done:
            self._log.end(*self._outcome)
        elif self._response.was_dropped:
            self._log.end(503, "too_many_bodies")
        else:
            self._log.end(CLIENT_LEFT, "client_left")

    def count_tokens(self, request: ClientRequest) -> ClientRequest:
        """Read the response's usage; returns the request, which asks for it.

        Not that of a stream with running counts and no usage at its end, which our agents refuse.
        """
        self._streams = request.stream
        if not request.stream or request.include_usage or request.continuous_usage:
            return request
        self._hides_usage = True
        return with_usage(request)

    @property
    def may_have_more(self) -> bool:
        """Whether agents may have made more than was relayed: all of what is not streamed, and what a client
        that does not read has left with them.
        """
        return not self._streams or (self._is_paused and not self._is_done)

    def _read_usage(self, events: bytes) -> bytes:
        """Note a stream's usage; returns the events, without it where the client has not asked for it."""
        if not sse.has_empty_choices(events):
            return events
        shown = []
        for event in sse.split(events):
            usage = reported_usage(sse.data(event) or b"") if sse.has_empty_choices(event) else None
            self.usage = usage or self.usage
            if usage is None or not self._hides_usage:
                shown.append(event)
            elif sse.TIMING in event:
                shown.append(_without_usage(event))
        return b"".join(shown)

    def _headers(self) -> tuple[Header, Header]:
        timing = (b"server-timing", self._log.server_timing().encode("latin-1"))
        return _request_id_header(self._log.request_id), timing

    def _on_pause(self, paused: bool) -> None:
        self._is_paused = paused
        for source in self._sources:
            (source.pause if paused else source.resume)()


def _outcome(events: bytes) -> tuple[int, str, str]:
    """The status, code and message of an error event that an agent wrote."""
    event = next(sse.split(events[events.index(sse.ERROR_EVENT) :]))
    error = agent_error(sse.data(event) or b"") or AgentError()
    status = 400 if error.type == "invalid_request_error" else 502
    return status, str(error.code or "agent_error"), error.message


def _without_usage(event: bytes) -> bytes:
    """An event without its usage."""
    members = msgspec.json.decode(sse.data(event) or b"{}", type=dict[str, msgspec.Raw])
    del members["usage"]
    return sse.event(members)


def error_response(
    error: ProxyError, request_id: RequestId, is_anthropic: bool
) -> tuple[int, list[Header], bytes]:
    """The status, headers and body of an error in OpenAI's or Anthropic's format."""
    body = messages.error_body(error) if is_anthropic else error.body()
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
    content = (b"content-type", b"application/json")
    return error.status, [content, _request_id_header(request_id), *headers], body


def send_error(
    response: ClientResponse, request_id: RequestId, error: ProxyError, is_anthropic: bool
) -> None:
    """Send an error that is the whole response."""
    response.send(*error_response(error, request_id, is_anthropic))


def _request_id_header(request_id: RequestId) -> Header:
    return (b"x-request-id", request_id.encode())
