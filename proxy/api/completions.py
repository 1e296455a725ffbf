# SPDX-License-Identifier: Apache-2.0
"""The completion endpoints: from a request's body to the last byte of its response.

They are beneath Quart's request context and routing, which would cost as much as all the rest of what the
proxy does for a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from kvferry.common.exceptions import release_locals
from kvferry.common.http.server import Header
from kvferry.common.work_pool import WorkPool
from kvferry.proxy import sse
from kvferry.proxy.api.auth import ANONYMOUS, Client
from kvferry.proxy.api.token_reservation import RequestEnd, TokenReservation
from kvferry.proxy.api.translations import messages, responses
from kvferry.proxy.errors import (
    AgentError,
    BodyTooLarge,
    BodyTooSlow,
    InvalidRequest,
    ProxyError,
    TooManyBodies,
    TooManyResponses,
    agent_error,
)
from kvferry.proxy.exchange.exchange import Exchange
from kvferry.proxy.exchange.legs import PausableSource
from kvferry.proxy.http.client_connection import ClientResponse
from kvferry.proxy.ids import Api, Endpoint, Identity, new_identity
from kvferry.proxy.request import (
    ClientRequest,
    ReportedUsage,
    RequestHead,
    check_encoding,
    parse_request,
    reported_usage,
    salted,
    with_usage,
)
from kvferry.proxy.telemetry.history import FailureLog
from kvferry.proxy.telemetry.metrics import CLIENT_LEFT, Metrics
from kvferry.proxy.telemetry.request_log import Phase, RequestLog, Timelines
from kvferry.proxy.telemetry.request_trace import RequestTrace

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Tracing

T = TypeVar("T")

logger = logging.getLogger(__name__)

INLINE_BODY_BYTES = 64 * 1024
"""Larger bodies, of requests and of whole responses, are read beside the event loop: 8 MiB take up to 50 ms,
of which no call more than 14.
"""
SHORT_BODY_BYTES = 1024 * 1024
"""These do not wait for larger ones."""
MAX_PARSED_BYTES = 256 * 1024 * 1024
"""Of bodies that wait to be parsed, or are being parsed."""
PARSE_TIMEOUT_S = 30.0

STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", sse.CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
)

_HEADERS = frozenset((b"x-cache-ttl-s", b"x-priority", b"x-slo-reject", b"x-slo-tpot-ms", b"x-slo-ttft-ms"))
"""Those that are as good as fields of the body."""

NewExchange = Callable[[ClientRequest, Identity, RequestLog], Exchange]

APIS: dict[str, Api] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat/completions",
    messages.PATH: "messages",
    responses.PATH: "responses",
}


class Translation(Protocol):
    """One request of another API, and its answer."""

    def chat_request(self, raw: bytes) -> bytes:
        """Rewrite the body as a chat's. Raises `InvalidRequest`."""

    def whole(self, body: bytes) -> bytes:
        """Rewrite an answer that is not streamed. Raises `BadResponse`."""

    def events(self, events: bytes) -> bytes:
        """Rewrite whole events of a stream; the result may be empty. Raises `BadResponse`."""


TRANSLATIONS: dict[str, Callable[[], Translation]] = {
    messages.PATH: messages.MessagesRewriter,
    responses.PATH: responses.ResponsesRewriter,
}


class Completions:
    """Serves the requests to these endpoints."""

    def __init__(
        self,
        *,
        new_exchange: NewExchange,
        max_model_len: Callable[[str], int | None],
        share_prefixes: bool,
        keep_turns_s: float | None,
        metrics: Metrics,
        failures: FailureLog,
        timelines: Timelines,
        max_body_bytes: int,
        body_timeout_s: float,
        log_prompts: bool,
        tracing: Tracing | None,
    ) -> None:
        self._new_exchange = new_exchange
        self._max_model_len = max_model_len
        self._share_prefixes = share_prefixes
        self._keep_turns_s = keep_turns_s
        self._metrics = metrics
        self._failures = failures
        self._timelines = timelines
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._log_prompts = log_prompts
        self._tracing = tracing
        self._parsers = WorkPool(
            "bodies",
            short_bytes=SHORT_BODY_BYTES,
            max_bytes=MAX_PARSED_BYTES,
            timeout_s=PARSE_TIMEOUT_S,
            busy=lambda why: TooManyBodies(f"large bodies wait to be read: {why}"),
        )

    async def __call__(self, head: RequestHead, client: Client, response: ClientResponse) -> None:
        """Serve one request. A client that disconnects cancels this task; so does a proxy that stops."""
        make_translation, log = TRANSLATIONS.get(head.path), self._begin(head)
        translation = None if make_translation is None else make_translation()
        endpoint: Endpoint = "completions" if log.api == "completions" else "chat/completions"
        writer = ResponseWriter(response, head, log, translation)
        tokens: TokenReservation | None = None
        exchange: Exchange | None = None
        refused = False
        try:
            rate_limit = client.rate_limit
            if rate_limit is not None:
                rate_limit.admit(time.monotonic())
            raw = await self._body(head, response)
            salt_key = None if self._share_prefixes else client.salt_key
            parse = partial(_parse_body, endpoint, raw, translation, salt_key)
            request = await self._run_beside(len(raw), parse)
            if rate_limit is not None and rate_limit.counts_tokens:
                context = self._max_model_len(request.model)
                tokens = TokenReservation(rate_limit, request, context, time.monotonic())
            request = writer.count_tokens(_with_client(request, head, client, self._keep_turns_s))
            log.set_request(request, show_prompt=self._log_prompts)
            ids = new_identity(
                endpoint,
                log.request_id,
                request.seed,
                head.header(b"traceparent"),
                head.header(b"x-session-id"),
            )
            log.set_traceparent(ids.traceparent)
            exchange = self._new_exchange(request, ids, log)
            writer.include_timing = request.include_timing
            await exchange.run(writer)
            if (size := writer.num_unprepared) > 0:
                await self._run_beside(size, writer.prepare)
            writer.end()
        except ProxyError as error:
            writer.fail(error)
            refused = error.status in (429, 503) and not isinstance(error, TooManyResponses)
            release_locals(error)
        except asyncio.CancelledError as cancelled:
            writer.client_left()
            if not response.is_disconnected:
                response.abort()
            release_locals(cancelled)
        except Exception:
            logger.exception("request %s: internal error", log.request_id, extra=log.log_ids())
            if log.phase is Phase.ENDED:
                response.abort()
            else:
                writer.fail(ProxyError("internal error of the proxy"))
        finally:
            sent = 0
            if writer.usage is not None:
                log.count_tokens(writer.usage)
            elif exchange is not None and (sent := max(log.num_events, exchange.num_tokens)):
                log.count_tokens(ReportedUsage(exchange.prompt_tokens, sent))  # of a stream that broke off
            if tokens is not None:
                end = RequestEnd(
                    usage=writer.usage,
                    sent=sent,
                    unseen=writer.may_have_more,
                    refused=refused,
                    leg_seconds=log.leg_seconds(),
                )
                tokens.settle(end, time.monotonic())

    def _begin(self, head: RequestHead) -> RequestLog:
        """The log of a request, with its trace where traces are on."""
        trace, arrived_at = None, time.monotonic()
        if self._tracing is not None:
            path = head.path
            about = {"http.request.method": "POST", "http.route": path, "kvferry.request_id": head.id}
            parent = {name: head.header(name.encode()) or "" for name in ("traceparent", "tracestate")}
            span = self._tracing.serve(f"POST {path}", arrived_at, parent, about)
            trace = RequestTrace(span, arrived_at)
        api = APIS[head.path]
        return RequestLog(api, head.id, self._metrics, self._failures, self._timelines, trace, arrived_at)

    async def _run_beside(self, nbytes: int, work: Callable[[], T]) -> T:
        """Return what `work` makes of a body, of a large one beside the event loop.

        Raises what `work` raises, and `TooManyBodies`.
        """
        return work() if nbytes <= INLINE_BODY_BYTES else await self._parsers.run(nbytes, work)

    async def _body(self, head: RequestHead, response: ClientResponse) -> bytes:
        """The request's whole body. Raises `UnsupportedEncoding`, `BodyTooLarge` or `BodyTooSlow`."""
        check_encoding(head.header(b"content-encoding"))
        limit, body = self._max_body_bytes, response.take_body()
        if body is None and int(head.headers.get(b"content-length", b"0")) <= limit:
            try:
                async with asyncio.timeout(self._body_timeout_s):
                    body = await response.read_body(limit)
            except TimeoutError as error:
                raise BodyTooSlow("the body did not arrive in time") from error
        if body is None or len(body) > limit:
            raise BodyTooLarge(f"the body exceeds {limit} bytes")
        return body


def _parse_body(
    endpoint: Endpoint, raw: bytes, translation: Translation | None, salt_key: bytes | None
) -> ClientRequest:
    request = parse_request(endpoint, raw if translation is None else translation.chat_request(raw))
    return request if salt_key is None else salted(request, salt_key)


def _with_client(
    request: ClientRequest, head: RequestHead, client: Client, keep_turns_s: float | None
) -> ClientRequest:
    """Set what the headers, the client's key and this proxy say of when the request is to be served, and for
    how long its KV may be kept. Raises `InvalidRequest`.
    """
    if client is ANONYMOUS and request.cache_ttl_s is None and _HEADERS.isdisjoint(head.headers):
        return request
    ttl_s = request.cache_ttl_s if (of_header := head.cache_ttl_s()) is None else of_header
    if keep_turns_s is None:
        most_s, why = 0.0, "is not supported by this proxy"
    else:
        most_s = keep_turns_s if client.max_cache_ttl_s is None else client.max_cache_ttl_s
        why = f"may be {most_s:g} at most"
    if ttl_s is not None and ttl_s > most_s:
        name = "cache_ttl_s" if of_header is None else "x-cache-ttl-s"
        raise InvalidRequest(f"{name} {why}", param=name)
    asked = request.priority if (of_header := head.priority()) is None else of_header
    priority, body = max(asked, client.min_priority), request.body
    if priority != request.priority and request.asks_for("priority"):
        body = {**body, "priority": msgspec.Raw(b"%d" % priority)}
    return msgspec.structs.replace(
        request,
        body=body,
        ttft_s=head.objective_s("x-slo-ttft-ms"),
        tpot_s=head.objective_s("x-slo-tpot-ms"),
        rejects_late=head.rejects_late(),
        priority=priority,
        key=client.id,
        cache_ttl_s=ttl_s,
        max_cache_ttl_s=most_s,
    )


class ResponseWriter:
    """The client's end of one exchange (`ResponseSink`).

    A stream's HTTP response starts with its first events. A client that does not read pauses the sources
    (`throttling`), so that the buffer stays bounded.
    """

    def __init__(
        self,
        response: ClientResponse,
        head: RequestHead,
        log: RequestLog,
        translation: Translation | None = None,
    ) -> None:
        self._response = response
        self._head = head
        self._log = log
        self._translation = translation
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
        if not self.is_started or self.include_timing or self._translation is not None:
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
        if self._translation is not None:
            events = self._translation.events(events)
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
        if self._translation is not None:
            self._whole = content_type, self._translation.whole(body)

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
            self._response.send(*error_response(error, self._head))
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
        return (b"x-request-id", self._head.id.encode()), timing

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


def error_response(error: ProxyError, head: RequestHead) -> tuple[int, list[Header], bytes]:
    """The status, headers and body of an error, in the format of the API that was called."""
    body = messages.error_body(error) if head.path.startswith(messages.PATH) else error.body()
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
    content = (b"content-type", b"application/json")
    return error.status, [content, (b"x-request-id", head.id.encode()), *headers], body
