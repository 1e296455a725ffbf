# SPDX-License-Identifier: Apache-2.0
"""The proxy's application: all its routes, and what holds for each request before it is routed.

It is a Quart application, which any ASGI server serves, and Quart's test client tests. The completion
endpoints are ASGI endpoints beside Quart's own routes (`Entry`). On the connections of our own server
(`ClientConnection`) they write events without ASGI's `send`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import msgspec
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge, RequestTimeout

from kvferry.common.http.browser_guard import BrowserGuard
from kvferry.common.http.refusals import plain_message
from kvferry.common.http.server import Header
from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.api import openapi
from kvferry.proxy.api.auth import ANONYMOUS, ApiKeys, Client, authenticate
from kvferry.proxy.api.completions import APIS, Completions, error_response
from kvferry.proxy.api.dashboard import DashboardFeed, add_dashboard
from kvferry.proxy.api.operator.commands import OperatorApi, PageName
from kvferry.proxy.api.operator.pages import JSON, Page
from kvferry.proxy.api.tokenizing import TokenizerRelay
from kvferry.proxy.api.translations import messages
from kvferry.proxy.canary.canary import Canary
from kvferry.proxy.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ModelNotFound,
    NotFound,
    ProxyError,
    RefusedPage,
    WrongMethod,
)
from kvferry.proxy.http.asgi_response import AsgiResponse
from kvferry.proxy.http.client_connection import (
    EXTENSION,
    ClientConnection,
    ClientResponse,
    Message,
    Receive,
    Scope,
    Send,
)
from kvferry.proxy.http.cors import CorsPolicy
from kvferry.proxy.ids import request_id_from
from kvferry.proxy.request import RequestHead, check_encoding
from kvferry.proxy.wire.registration import Incarnation, Role

FOLDER = str(Path(__file__).parent / "api")
HEAD, CLIENT = "kvferry.head", "kvferry.client"
"""Where `Entry` leaves the `RequestHead` and `Client` of Quart's requests: in their scope."""

Application = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
Endpoint = Callable[[RequestHead, Client, ClientResponse], Coroutine[Any, Any, None]]


def create_app(
    *,
    completions: Completions,
    views: OperatorApi,
    dashboard: DashboardFeed,
    tokenizers: TokenizerRelay,
    canary: Canary,
    api_keys: ApiKeys | None,
    browser_guard: BrowserGuard,
    cors: CorsPolicy | None,
    max_body_bytes: int,
    body_timeout_s: float,
    client_stall_s: float,
) -> Quart:
    """Wire the application."""
    # Explicit paths: Quart cannot find them in a namespace package.
    app = Quart(__name__, root_path=FOLDER, instance_path=FOLDER, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body_bytes
    app.config["BODY_TIMEOUT"] = body_timeout_s
    # Quart would end the dashboard's feed after 60 s.
    app.config["RESPONSE_TIMEOUT"] = None

    endpoints: dict[tuple[str, str], Endpoint] = {("POST", path): completions for path in APIS}
    endpoints |= {("GET", "/health"): health, ("HEAD", "/health"): health}
    entry = Entry(
        app.asgi_app,
        endpoints,
        api_keys=api_keys,
        browser_guard=browser_guard,
        cors=cors,
        stall_s=client_stall_s,
    )
    app.asgi_app = entry  # type: ignore[method-assign]
    for method, path in endpoints:  # so that Quart refuses the other methods
        app.add_url_rule(path, f"{method} {path}", methods=[method], provide_automatic_options=False)

    @app.get("/v1/models")
    async def models() -> Response:
        return await page("models")

    # A path, since models may be named by theirs.
    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        cards = msgspec.json.decode((await views.page("models")).body, type=_ModelList).data
        for each in cards:
            if each["id"] == name:
                return Response(msgspec.json.encode(each), content_type=JSON)
        raise ModelNotFound(name, (each["id"] for each in cards))

    @app.get("/version")
    async def version_page() -> Response:
        return Response(msgspec.json.encode({"version": VERSION}), content_type=JSON)

    @app.post("/tokenize")
    async def tokenize() -> Response:
        return _from_agent(await tokenizers.forward("/tokenize", await _admitted_body(), _head().id))

    @app.post("/detokenize")
    async def detokenize() -> Response:
        return _from_agent(await tokenizers.forward("/detokenize", await _admitted_body(), _head().id))

    @app.post(messages.COUNT_PATH)
    async def count_tokens() -> Response:
        body = messages.tokenize_request(await _admitted_body())
        return _from_agent(messages.token_count(await tokenizers.forward("/tokenize", body, _head().id)))

    @app.get("/ready")
    async def ready() -> Response:
        return await page("ready")

    @app.get("/nodes")
    async def nodes() -> Response:
        return await page("nodes")

    @app.get("/nodes/targets")
    async def targets() -> Response:
        return await page("targets")

    # A path, since incarnations of other engines' servers contain URLs.
    @app.post("/nodes/<path:incarnation>/cordon")
    async def cordon(incarnation: str) -> Response:
        return _page_response(await views.cordon(Incarnation(incarnation), True))

    @app.post("/nodes/<path:incarnation>/uncordon")
    async def uncordon(incarnation: str) -> Response:
        return _page_response(await views.cordon(Incarnation(incarnation), False))

    @app.post("/nodes/<path:incarnation>/role/<any(prefill, decode, both):role>")
    async def pin_role(incarnation: str, role: Role) -> Response:
        return _page_response(await views.pin_role(Incarnation(incarnation), role))

    @app.post("/nodes/<path:incarnation>/drain")
    async def drain(incarnation: str) -> Response:
        return _page_response(await views.drain(Incarnation(incarnation)))

    @app.get("/canary")
    async def canary_pairs() -> Response:
        return Response(msgspec.json.encode(canary.report()), content_type=JSON)

    @app.post("/canary")
    async def probe() -> Response:
        report = await canary.probe(request.args.get("model"))
        if report is None:
            raise NotFound(404, "no pair is up that the canary can probe")
        return Response(msgspec.json.encode(report), content_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        return await page("metrics")

    async def page(name: PageName) -> Response:
        return _page_response(await views.page(name))

    @cache  # made when it is read: a third of what it takes to wire the application
    def document() -> bytes:
        return msgspec.json.encode(openapi.document(VERSION))

    @app.get("/openapi.json")
    async def openapi_document() -> Response:
        return Response(document(), content_type="application/json")

    add_dashboard(app, dashboard, views)

    @app.errorhandler(ProxyError)
    async def on_proxy_error(error: ProxyError) -> Response:
        status, headers, body = error_response(error, _head())
        return Response(body, status, {name.decode(): value.decode("latin-1") for name, value in headers})

    @app.errorhandler(HTTPException)
    async def on_http_exception(error: HTTPException) -> Response:
        return await on_proxy_error(_error_of(error))

    return app


class Entry:
    """What each request passes before it is routed: it must not be caused by another site's page, gets an id,
    must have an API key, and its response says what pages of other origins may read.

    Args:
        app: Quart's own ASGI application, for what is not in `endpoints`.
        endpoints: By method and path, what is served without Quart: it takes a dozen turns of the event loop
            and as much CPU as all else that a request costs.
        browser_guard: Asked for requests to other servers; `ClientConnection` has asked it before the body.
        stall_s: How long a client of another server may read nothing of an endpoint's response.
    """

    def __init__(
        self,
        app: Application,
        endpoints: Mapping[tuple[str, str], Endpoint],
        *,
        api_keys: ApiKeys | None,
        browser_guard: BrowserGuard,
        cors: CorsPolicy | None,
        stall_s: float,
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._api_keys = api_keys
        self._browser_guard = browser_guard
        self._cors = cors
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = request_id_from(headers.get(b"x-request-id", b"").decode("latin-1"))
        head = RequestHead(scope["method"], scope["path"], headers, request_id)
        connection: ClientConnection | None = scope.get("extensions", {}).get(EXTENSION)
        response: ClientResponse | None = None if connection is None else connection.response
        if response is None:
            response = AsgiResponse(receive, send, self._stall_s)
        if self._cors is not None:
            response.headers = self._cors.headers(head.path, headers)
            preflight = self._cors.preflight(head.path, headers) if head.method == "OPTIONS" else None
            if preflight is not None:
                await response.serve(partial(_send_preflight, preflight))
                return
        try:
            if connection is None:
                self._check_page(head, scope["raw_path"])
            client = ANONYMOUS if self._api_keys is None else authenticate(self._api_keys, head)
        except ProxyError as error:
            await response.serve(partial(_send_error, head, error))
            return
        endpoint = self._endpoints.get((head.method, head.path))
        if endpoint is not None:
            await response.serve(partial(endpoint, head, client))
            return
        scope[HEAD], scope[CLIENT] = head, client
        await self._app(scope, receive, _with_headers(send, response.headers) if response.headers else send)

    def _check_page(self, head: RequestHead, target: bytes) -> None:
        refusal = self._browser_guard.refusal(head.method.encode(), target, head.headers)
        if refusal is not None:
            raise RefusedPage(*refusal)


async def health(_: RequestHead, client: Client, response: ClientResponse) -> None:
    """Say that the proxy is alive. Quart needs a dozen turns of the event loop, which a load balancer might
    not wait for while a hundred servers flood the proxy.
    """
    response.send(200, [(b"content-type", JSON.encode())], b'{"status":"ok"}')


async def _send_preflight(headers: Iterable[Header], response: ClientResponse) -> None:
    response.send(200, headers, b"")


async def _send_error(head: RequestHead, error: ProxyError, response: ClientResponse) -> None:
    response.send(*error_response(error, head))


def _with_headers(send: Send, headers: Iterable[Header]) -> Send:
    """Add headers to the response that an application sends."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*headers, *message.get("headers", ())]}
        await send(message)

    return send_with_headers


def _error_of(error: HTTPException) -> ProxyError:
    """The error for one of Quart's."""
    message = plain_message(error, request.method)
    match error:
        case MethodNotAllowed():
            return WrongMethod(message, allowed=", ".join(sorted(error.valid_methods or ())))
        case RequestEntityTooLarge():
            return BodyTooLarge(message)
        case RequestTimeout():
            return BodyTooSlow(message)
        case HTTPException(code=int(status)) if status < 500:
            return NotFound(status, message)
    return ProxyError("internal error of the proxy")


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


def _head() -> RequestHead:
    """The head of the request that Quart serves."""
    return cast(RequestHead, cast(Any, request.scope)[HEAD])


async def _admitted_body() -> bytes:
    """The body of a request that counts towards its key's rate.

    Raises `RateLimited` and `UnsupportedEncoding`.
    """
    client: Client = cast(Any, request.scope)[CLIENT]
    if client.rate_limit is not None:
        client.rate_limit.admit(time.monotonic())
    check_encoding(_head().header(b"content-encoding"))
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


def _from_agent(answer: bytes) -> Response:
    return Response(answer, headers={"X-Request-Id": _head().id}, content_type=JSON)


def _page_response(page: Page) -> Response:
    return Response(page.body, page.status, content_type=page.content_type)
