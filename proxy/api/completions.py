# SPDX-License-Identifier: Apache-2.0
"""The completion endpoints. They are beneath Quart's request context and routing, which would cost as much as
all the rest of what the proxy does for a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvferry.common.exceptions import release_locals
from kvferry.common.work_pool import PoolBusy, WorkPool
from kvferry.proxy.api.auth import Client
from kvferry.proxy.api.response_writer import ResponseRewriter, ResponseWriter
from kvferry.proxy.api.token_reservation import RequestEnd, TokenReservation
from kvferry.proxy.api.translations import messages, responses
from kvferry.proxy.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ProxyError,
    TooManyBodies,
    TooManyResponses,
)
from kvferry.proxy.exchange.exchange import Exchange
from kvferry.proxy.http.client_connection import ClientResponse
from kvferry.proxy.ids import Api, Endpoint, Identity, RandomBytes, new_identity
from kvferry.proxy.request import (
    ClientRequest,
    ReportedUsage,
    RequestHead,
    check_encoding,
    parse_request,
    salted,
)
from kvferry.proxy.telemetry.history import FailureLog
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Phase, RequestLog
from kvferry.proxy.telemetry.request_trace import RequestTrace
from kvferry.proxy.telemetry.timelines import Timelines

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

NewExchange = Callable[[ClientRequest, Identity, RequestLog], Exchange]

APIS: dict[str, Api] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat/completions",
    messages.PATH: "messages",
    responses.PATH: "responses",
}


class Translation(ResponseRewriter, Protocol):
    """One request of another API, and its answer."""

    def chat_request(self, raw: bytes) -> bytes:
        """Rewrite the body as a chat's. Raises `InvalidRequest`."""


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
        self._metrics = metrics
        self._failures = failures
        self._timelines = timelines
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._log_prompts = log_prompts
        self._tracing = tracing
        self._random = RandomBytes()
        self._parsers = WorkPool(
            "bodies", short_bytes=SHORT_BODY_BYTES, max_bytes=MAX_PARSED_BYTES, timeout_s=PARSE_TIMEOUT_S
        )

    async def __call__(self, head: RequestHead, client: Client, response: ClientResponse) -> None:
        """Serve one request. A client that disconnects cancels this task; so does a proxy that stops."""
        make_translation, log = TRANSLATIONS.get(head.path), self._begin(head)
        translation = None if make_translation is None else make_translation()
        endpoint: Endpoint = "completions" if log.api == "completions" else "chat/completions"
        writer = ResponseWriter(response, log, translation)
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
            request = writer.count_tokens(request)
            log.set_request(request, show_prompt=self._log_prompts)
            ids = new_identity(
                endpoint,
                log.request_id,
                request.seed,
                head.header(b"traceparent"),
                head.header(b"x-session-id"),
                self._random,
            )
            log.set_traceparent(ids.traceparent)
            exchange = self._new_exchange(request, ids, log)
            writer.include_timing = request.include_timing
            await exchange.run(writer)
            if writer.num_unprepared:
                await self._run_beside(writer.num_unprepared, writer.prepare)
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
            sent = max(log.num_events, exchange.num_tokens if exchange is not None else 0)
            if writer.usage is not None:
                log.count_tokens(writer.usage)
            elif exchange is not None and sent:  # of a stream that broke off
                log.count_tokens(ReportedUsage(exchange.prompt_tokens, sent))
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
        if nbytes <= INLINE_BODY_BYTES:
            return work()
        try:
            return await self._parsers.run(nbytes, work)
        except PoolBusy as busy:
            raise TooManyBodies(f"large bodies wait to be read: {busy}") from None

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
