# SPDX-License-Identifier: Apache-2.0
"""The two completion endpoints, served on ASGI itself: what Quart would add to each request costs more than
all that the proxy does for it. Every other path is the application's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from kvferry.proxy import sse
from kvferry.proxy.api.auth import NOBODY, ApiKeys, admitted
from kvferry.proxy.api.client_stream import ClientStream
from kvferry.proxy.api.rate_limit import RateLimit
from kvferry.proxy.api.request_tasks import RequestTasks
from kvferry.proxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, WrongMethod
from kvferry.proxy.exchange.exchange import Exchange
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.http.client_connection import EXTENSION, ClientReply, Header
from kvferry.proxy.ids import Endpoint, Identity, RequestId, new_identity, request_id_from
from kvferry.proxy.request import ClientRequest, parse_request
from kvferry.proxy.telemetry.history import History
from kvferry.proxy.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
NewExchange = Callable[[ClientRequest, Identity, RequestLog], Exchange]

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat/completions",
}
STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", sse.CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


class Completions:
    """An ASGI application around another one. It needs `ClientConnection` under it."""

    def __init__(
        self,
        otherwise: App,
        *,
        new_exchange: NewExchange,
        open_requests: RequestTasks,
        api_keys: ApiKeys | None,
        metrics: Metrics,
        history: History,
        max_body_bytes: int,
        body_timeout_s: float,
        log_prompts: bool,
    ) -> None:
        self._otherwise = otherwise
        self._new_exchange = new_exchange
        self._open_requests = open_requests
        self._api_keys = api_keys
        self._metrics = metrics
        self._history = history
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await self._otherwise(scope, receive, send)
            return
        reply: ClientReply = scope["extensions"][EXTENSION]["reply"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = request_id_from(_text(headers.get(b"x-request-id")))
        allowance = self._allowance(scope, headers)
        if isinstance(allowance, ProxyError):
            _refuse(reply, request_id, allowance)
        else:
            await self._serve(endpoint, request_id, headers, reply, receive, allowance)

    def _allowance(self, scope: Scope, headers: dict[bytes, bytes]) -> RateLimit | ProxyError:
        """What the client may still ask for, or why the request is not even looked at."""
        keys, method, client = self._api_keys, scope["method"], NOBODY
        if keys is not None:
            authorization = _text(headers.get(b"authorization"))
            admission = admitted(keys, scope["path"], method, authorization)
            if isinstance(admission, ProxyError):
                return admission
            client = admission
        if method != "POST":
            return WrongMethod(f"{method} is not for this path", allowed="POST")
        return client.allowance

    async def _serve(
        self,
        endpoint: Endpoint,
        request_id: RequestId,
        headers: dict[bytes, bytes],
        reply: ClientReply,
        receive: Receive,
        allowance: RateLimit,
    ) -> None:
        """One request. A client that leaves cancels this task; so does a proxy that stops."""
        reply.lost = self._open_requests.join()
        record = RequestLog(endpoint, request_id, self._metrics, self._history)
        out = ClientStream(reply, record, (*STREAM_HEADERS, _named(request_id)))
        try:
            record.draw_on(allowance)
            raw = await self._body(headers, reply, receive)
            asked = parse_request(endpoint, raw)
            record.tell_request(asked, show_prompt=self._log_prompts)
            ids = new_identity(
                endpoint,
                request_id,
                asked.seed,
                _text(headers.get(b"traceparent")),
                _text(headers.get(b"x-session-id")),
            )
            exchange = self._new_exchange(asked, ids, record)
            if asked.stream:
                out.wants_timing = asked.wants_timing
                await exchange.stream(out)
                out.end()
            else:
                answer = await exchange.answer()
                record.tell_answer(answer.body)
                record.end(200)
                timing = (b"server-timing", record.server_timing().encode("latin-1"))
                content = (b"content-type", answer.content_type.encode("latin-1"))
                reply.whole(200, (content, _named(request_id), timing), answer.body)
        except ProxyError as error:
            _fail(reply, out, record, error)
        except asyncio.CancelledError:
            out.abandon()
            if not reply.is_lost:
                reply.give_up()
        except Exception:
            logger.exception("request %s failed by a defect of ours", request_id)
            if record.phase is Phase.ENDED:
                raise
            _fail(reply, out, record, ProxyError("the proxy failed; its log says why"))

    async def _body(self, headers: dict[bytes, bytes], reply: ClientReply, receive: Receive) -> bytes:
        """The request's whole body. Raises `BodyTooLarge` or `BodyTooSlow`."""
        limit, body = self._max_body_bytes, reply.body
        if body is None and int(headers.get(b"content-length", b"0")) <= limit:
            try:
                async with asyncio.timeout(self._body_timeout_s):
                    body = await _received(receive, limit)
            except TimeoutError as error:
                raise BodyTooSlow("the body did not arrive in time") from error
        if body is None or len(body) > limit:
            raise BodyTooLarge(f"the body exceeds {limit} bytes")
        return body


async def _received(receive: Receive, limit: int) -> bytes:
    """A body that is still on its way; no more of it than makes it longer than `limit`."""
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= limit:
        message = await receive()
        part, more = message.get("body", b""), message.get("more_body", False)
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _fail(reply: ClientReply, out: ClientStream, record: RequestLog, error: ProxyError) -> None:
    """End a request by an error: as an HTTP status, or in the stream that has begun."""
    if out.has_begun:
        out.fail(error)
    else:
        record.end(error.status, error.code)
        _refuse(reply, record.request_id, error)


def _refuse(reply: ClientReply, request_id: RequestId, error: ProxyError) -> None:
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
    content = (b"content-type", b"application/json")
    reply.whole(error.status, (content, _named(request_id), *headers), error.body())


def _named(request_id: RequestId) -> Header:
    return (b"x-request-id", request_id.encode())


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
