# SPDX-License-Identifier: Apache-2.0
"""The completion endpoints, which `ClientConnection` calls directly: the overhead of Quart and ASGI for a
request would exceed all the rest of what the proxy does for it.
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
from kvferry.proxy.api.auth import ANONYMOUS, ApiKeys, Client, authenticate
from kvferry.proxy.api.response_writer import ResponseRewriter, ResponseWriter, send_error
from kvferry.proxy.api.token_reservation import RequestEnd, TokenReservation
from kvferry.proxy.api.translations import messages, responses
from kvferry.proxy.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ProxyError,
    TooManyBodies,
    TooManyResponses,
    WrongMethod,
)
from kvferry.proxy.exchange.exchange import Exchange
from kvferry.proxy.http.client_connection import ClientResponse, Receive, Scope
from kvferry.proxy.ids import Api, Endpoint, Identity, RandomBytes, RequestId, new_identity, request_id_from
from kvferry.proxy.request import ClientRequest, ReportedUsage, check_encoding, parse_request, salted
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
    """Serves the requests to these endpoints (`Handler`)."""

    def __init__(
        self,
        *,
        new_exchange: NewExchange,
        max_model_len: Callable[[str], int | None],
        api_keys: ApiKeys | None,
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
        self._api_keys = api_keys
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

    async def __call__(self, scope: Scope, receive: Receive, response: ClientResponse) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = request_id_from(_text(headers.get(b"x-request-id")), self._random)
        make_translation = TRANSLATIONS.get(scope["path"])
        translation = None if make_translation is None else make_translation()
        if scope["path"] == messages.PATH and b"x-api-key" in headers:
            headers[b"authorization"] = b"Bearer " + headers[b"x-api-key"]  # as Anthropic's clients send it
        client = self._authorize(scope, headers)
        if isinstance(client, ProxyError):
            send_error(response, request_id, client, translation)
        else:
            log = self._begin(scope["path"], request_id, headers)
            await self._serve(log, headers, response, receive, client, translation)

    def _authorize(self, scope: Scope, headers: dict[bytes, bytes]) -> Client | ProxyError:
        """The client, or why the request is rejected."""
        keys, method, client = self._api_keys, scope["method"], ANONYMOUS
        if keys is not None:
            authorization = _text(headers.get(b"authorization"))
            authenticated = authenticate(keys, scope["path"], method, authorization)
            if isinstance(authenticated, ProxyError):
                return authenticated
            client = authenticated
        if method != "POST":
            return WrongMethod(f"{method} is not allowed for this path", allowed="POST")
        return client

    def _begin(self, path: str, request_id: RequestId, headers: dict[bytes, bytes]) -> RequestLog:
        """The log of a request, with its trace where traces are on."""
        trace, arrived_at = None, time.monotonic()
        if self._tracing is not None:
            about = {"http.request.method": "POST", "http.route": path, "kvferry.request_id": request_id}
            parent = {name: _text(headers.get(name.encode())) or "" for name in ("traceparent", "tracestate")}
            span = self._tracing.serve(f"POST {path}", arrived_at, parent, about)
            trace = RequestTrace(span, arrived_at)
        return RequestLog(
            APIS[path], request_id, self._metrics, self._failures, self._timelines, trace, arrived_at
        )

    async def _serve(
        self,
        log: RequestLog,
        headers: dict[bytes, bytes],
        response: ClientResponse,
        receive: Receive,
        client: Client,
        translation: Translation | None,
    ) -> None:
        """Serve one request. A client that disconnects cancels this task; so does a proxy that stops."""
        endpoint: Endpoint = "completions" if log.api == "completions" else "chat/completions"
        writer = ResponseWriter(response, log, translation)
        tokens: TokenReservation | None = None
        exchange: Exchange | None = None
        refused = False
        try:
            rate_limit = client.rate_limit
            if not rate_limit.is_unlimited:
                rate_limit.admit(time.monotonic())
            raw = await self._body(headers, response, receive)
            salt_key = None if self._share_prefixes else client.salt_key
            parse = partial(_parse_body, endpoint, raw, translation, salt_key)
            request = await self._run_beside(len(raw), parse)
            if rate_limit.counts_tokens:
                context = self._max_model_len(request.model)
                tokens = TokenReservation(rate_limit, request, context, time.monotonic())
            request = writer.count_tokens(request)
            log.set_request(request, show_prompt=self._log_prompts)
            ids = new_identity(
                endpoint,
                log.request_id,
                request.seed,
                _text(headers.get(b"traceparent")),
                _text(headers.get(b"x-session-id")),
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

    async def _body(self, headers: dict[bytes, bytes], response: ClientResponse, receive: Receive) -> bytes:
        """The request's whole body. Raises `UnsupportedEncoding`, `BodyTooLarge` or `BodyTooSlow`."""
        check_encoding(_text(headers.get(b"content-encoding")))
        limit, body = self._max_body_bytes, response.take_request_body()
        if body is None and int(headers.get(b"content-length", b"0")) <= limit:
            try:
                async with asyncio.timeout(self._body_timeout_s):
                    body = await _receive_body(receive, limit)
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


async def _receive_body(receive: Receive, limit: int) -> bytes:
    """The body that is still being received; reading stops once it exceeds `limit`."""
    body, more = bytearray(), True  # one buffer: freed pieces would leave gaps in the heap
    while more and len(body) <= limit:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
