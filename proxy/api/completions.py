# SPDX-License-Identifier: Apache-2.0
"""The two completion endpoints, directly on ASGI: Quart's overhead for a request would exceed all the rest of
what the proxy does for it. Every other path is left to the wrapped application.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from kvferry.proxy.api.auth import ANONYMOUS, ApiKeys, authenticate
from kvferry.proxy.api.rate_limit import RateLimit
from kvferry.proxy.api.response_writer import ResponseWriter, send_error
from kvferry.proxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, WrongMethod
from kvferry.proxy.exchange.exchange import Exchange
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.http.client_connection import EXTENSION, ClientResponse
from kvferry.proxy.ids import Endpoint, Identity, RequestId, new_identity, request_id_from
from kvferry.proxy.request import ClientRequest, parse_request
from kvferry.proxy.telemetry.history import FailureLog
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
CANCEL_TIMEOUT_S = 2.0


class RequestTasks:
    """The tasks that serve requests now, so that a stopping proxy can cancel them.

    uvicorn abandons the tasks that are left at its graceful timeout; this owns them.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def add_current(self) -> Callable[[], object]:
        """Add the current task until it is done. Returns what cancels it."""
        task = cast(asyncio.Task[object], asyncio.current_task())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task.cancel

    async def cancel_all(self) -> None:
        """Cancel every running request, as if its client had disconnected, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_TIMEOUT_S)


class Completions:
    """ASGI middleware; it needs `ClientConnection` as the server's `http` class."""

    def __init__(
        self,
        fallback: App,
        *,
        new_exchange: NewExchange,
        request_tasks: RequestTasks,
        api_keys: ApiKeys | None,
        metrics: Metrics,
        failures: FailureLog,
        max_body_bytes: int,
        body_timeout_s: float,
        log_prompts: bool,
    ) -> None:
        self._fallback = fallback
        self._new_exchange = new_exchange
        self._request_tasks = request_tasks
        self._api_keys = api_keys
        self._metrics = metrics
        self._failures = failures
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await self._fallback(scope, receive, send)
            return
        response: ClientResponse = scope["extensions"][EXTENSION]["response"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = request_id_from(_text(headers.get(b"x-request-id")))
        rate_limit = self._authorize(scope, headers)
        if isinstance(rate_limit, ProxyError):
            send_error(response, request_id, rate_limit)
        else:
            await self._serve(endpoint, request_id, headers, response, receive, rate_limit)

    def _authorize(self, scope: Scope, headers: dict[bytes, bytes]) -> RateLimit | ProxyError:
        """The client's rate limit, or why the request is rejected."""
        keys, method, client = self._api_keys, scope["method"], ANONYMOUS
        if keys is not None:
            authorization = _text(headers.get(b"authorization"))
            authenticated = authenticate(keys, scope["path"], method, authorization)
            if isinstance(authenticated, ProxyError):
                return authenticated
            client = authenticated
        if method != "POST":
            return WrongMethod(f"{method} is not allowed for this path", allowed="POST")
        return client.rate_limit

    async def _serve(
        self,
        endpoint: Endpoint,
        request_id: RequestId,
        headers: dict[bytes, bytes],
        response: ClientResponse,
        receive: Receive,
        rate_limit: RateLimit,
    ) -> None:
        """Serve one request. A client that disconnects cancels this task; so does a proxy that stops."""
        response.on_disconnect = self._request_tasks.add_current()
        log = RequestLog(endpoint, request_id, self._metrics, self._failures)
        writer = ResponseWriter(response, log)
        try:
            rate_limit.admit(time.monotonic())
            if rate_limit.counts_tokens:
                log.charge_tokens_to(rate_limit)
            raw = await self._body(headers, response, receive)
            request = parse_request(endpoint, raw)
            log.set_request(request, show_prompt=self._log_prompts)
            ids = new_identity(
                endpoint,
                request_id,
                request.seed,
                _text(headers.get(b"traceparent")),
                _text(headers.get(b"x-session-id")),
            )
            exchange = self._new_exchange(request, ids, log)
            writer.include_timing = request.include_timing
            await exchange.run(writer)
            writer.end()
        except ProxyError as error:
            writer.fail(error)
        except asyncio.CancelledError:
            writer.client_left()
            if not response.is_disconnected:
                response.abort()
        except Exception:
            logger.exception("request %s: internal error", request_id)
            if log.phase is Phase.ENDED:
                raise
            writer.fail(ProxyError("internal error of the proxy"))

    async def _body(self, headers: dict[bytes, bytes], response: ClientResponse, receive: Receive) -> bytes:
        """The request's whole body. Raises `BodyTooLarge` or `BodyTooSlow`."""
        limit, body = self._max_body_bytes, response.request_body
        if body is None and int(headers.get(b"content-length", b"0")) <= limit:
            try:
                async with asyncio.timeout(self._body_timeout_s):
                    body = await _receive_body(receive, limit)
            except TimeoutError as error:
                raise BodyTooSlow("the body did not arrive in time") from error
        if body is None or len(body) > limit:
            raise BodyTooLarge(f"the body exceeds {limit} bytes")
        return body


async def _receive_body(receive: Receive, limit: int) -> bytes:
    """The body that is still being received; reading stops once it exceeds `limit`."""
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= limit:
        message = await receive()
        part, more = message.get("body", b""), message.get("more_body", False)
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
