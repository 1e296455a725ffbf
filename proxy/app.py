# SPDX-License-Identifier: Apache-2.0
"""The proxy's HTTP routes."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge, RequestTimeout

from kvferry.proxy.api import openapi
from kvferry.proxy.api.auth import MESSAGES_PREFIX, ApiKeys, request_authorization, require_keys
from kvferry.proxy.api.dashboard import DashboardFeed, add_dashboard
from kvferry.proxy.api.operator.commands import OperatorApi, PageName
from kvferry.proxy.api.operator.pages import JSON, Page
from kvferry.proxy.api.response_writer import send_error
from kvferry.proxy.api.tokenizing import TokenizerRelay
from kvferry.proxy.api.translations import messages
from kvferry.proxy.errors import BodyTooLarge, BodyTooSlow, ModelNotFound, NotFound, ProxyError, WrongMethod
from kvferry.proxy.http.client_connection import ClientResponse, Receive, Scope
from kvferry.proxy.ids import RequestId, request_id_from
from kvferry.proxy.request import check_encoding
from kvferry.proxy.wire.registration import Incarnation

FOLDER = str(Path(__file__).parent / "api")


def create_app(
    *,
    views: OperatorApi,
    dashboard: DashboardFeed,
    tokenizers: TokenizerRelay,
    api_keys: ApiKeys | None,
    max_body_bytes: int,
    body_timeout_s: float,
) -> Quart:
    """The application, for all but the completion endpoints."""
    # Explicit paths: Quart cannot find them in a namespace package.
    app = Quart(__name__, root_path=FOLDER, instance_path=FOLDER, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body_bytes
    app.config["BODY_TIMEOUT"] = body_timeout_s
    # Quart would end the dashboard's feed after 60 s.
    app.config["RESPONSE_TIMEOUT"] = None

    @app.get("/v1/models")
    async def models() -> Response:
        return await _page(views, "models")

    # A path, since models may be named by theirs.
    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        return await _model_page(views, name)

    @app.get("/version")
    async def version_page() -> Response:
        return Response(msgspec.json.encode({"version": version("kvferry")}), content_type=JSON)

    @app.post("/tokenize")
    async def tokenize() -> Response:
        return await _from_agent(tokenizers, api_keys)

    @app.post(messages.COUNT_PATH)
    async def count_tokens() -> Response:
        return await _count_tokens(tokenizers, api_keys)

    @app.post("/detokenize")
    async def detokenize() -> Response:
        return await _from_agent(tokenizers, api_keys)

    @app.get("/ready")
    async def ready() -> Response:
        return await _page(views, "ready")

    @app.get("/nodes")
    async def nodes() -> Response:
        return await _page(views, "nodes")

    @app.get("/nodes/targets")
    async def targets() -> Response:
        return await _page(views, "targets")

    # A path, since incarnations of other engines' servers contain URLs.
    @app.post("/nodes/<path:incarnation>/cordon")
    async def cordon(incarnation: str) -> Response:
        return await _cordon(views, Incarnation(incarnation), True)

    @app.post("/nodes/<path:incarnation>/uncordon")
    async def uncordon(incarnation: str) -> Response:
        return await _cordon(views, Incarnation(incarnation), False)

    @app.post("/nodes/<path:incarnation>/drain")
    async def drain(incarnation: str) -> Response:
        try:
            return _page_response(await views.drain(Incarnation(incarnation)))
        except ProxyError as error:
            return _error_response(error, _request_id())

    @app.get("/metrics")
    async def metrics() -> Response:
        return await _page(views, "metrics")

    document = msgspec.json.encode(openapi.document(version("kvferry")))

    @app.get("/openapi.json")
    async def openapi_document() -> Response:
        return Response(document, content_type="application/json")

    add_dashboard(app, dashboard, views)
    if api_keys is not None:
        require_keys(app, api_keys, lambda error: _error_response(error, _request_id()))

    @app.errorhandler(HTTPException)
    async def on_http_exception(error: HTTPException) -> Response:
        return _error_response(_error_of(error), _request_id())

    return app


def _error_of(error: HTTPException) -> ProxyError:
    """The error for one of Quart's."""
    message = error.description or error.name
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


async def serve_health(scope: Scope, receive: Receive, response: ClientResponse) -> None:
    """Say that the proxy is alive (`Handler`). In a few turns of the event loop: Quart needs a dozen, which a
    load balancer might not wait for while a hundred servers flood the proxy.
    """
    if scope["method"] in ("GET", "HEAD"):
        response.send(200, [(b"content-type", JSON.encode())], b'{"status":"ok"}')
        return
    headers: dict[bytes, bytes] = dict(scope["headers"])
    request_id = request_id_from(headers.get(b"x-request-id", b"").decode("latin-1"))
    error = WrongMethod(f"{scope['method']} is not allowed for this path", allowed="GET, HEAD")
    send_error(response, request_id, error)


async def _page(views: OperatorApi, name: PageName) -> Response:
    try:
        return _page_response(await views.page(name))
    except ProxyError as error:
        return _error_response(error, _request_id())


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


async def _model_page(views: OperatorApi, name: str) -> Response:
    try:
        models = msgspec.json.decode((await views.page("models")).body, type=_ModelList).data
    except ProxyError as error:
        return _error_response(error, _request_id())
    for model in models:
        if model["id"] == name:
            return Response(msgspec.json.encode(model), content_type=JSON)
    return _error_response(ModelNotFound("no agent serves this model", param="model"), _request_id())


async def _from_agent(tokenizers: TokenizerRelay, keys: ApiKeys | None) -> Response:
    """Pass a request on to an agent; it counts towards the key's rate of requests."""
    request_id = _request_id()
    try:
        answer = await tokenizers.forward(request.path, await _admitted_body(keys), request_id)
    except ProxyError as error:
        return _error_response(error, request_id)
    return Response(answer, headers={"X-Request-Id": request_id}, content_type=JSON)


async def _count_tokens(tokenizers: TokenizerRelay, keys: ApiKeys | None) -> Response:
    """Count the tokens of a prompt in the format of Anthropic's Messages."""
    request_id = _request_id()
    try:
        body = messages.tokenize_request(await _admitted_body(keys))
        answer = messages.token_count(await tokenizers.forward("/tokenize", body, request_id))
    except ProxyError as error:
        return _error_response(error, request_id)
    return Response(answer, headers={"X-Request-Id": request_id}, content_type=JSON)


async def _admitted_body(keys: ApiKeys | None) -> bytes:
    """The body of a request that counts towards its key's rate.

    Raises `RateLimited` and `UnsupportedEncoding`.
    """
    if keys is not None:
        client = keys.client(request_authorization(), request.method)
        client.rate_limit.admit(time.monotonic())
    check_encoding(request.headers.get("Content-Encoding"))
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


async def _cordon(views: OperatorApi, incarnation: Incarnation, cordoned: bool) -> Response:
    try:
        return _page_response(await views.cordon(incarnation, cordoned))
    except ProxyError as error:
        return _error_response(error, _request_id())


def _page_response(page: Page) -> Response:
    return Response(page.body, page.status, content_type=page.content_type)


def _error_response(error: ProxyError, request_id: RequestId) -> Response:
    headers = {**error.headers, "X-Request-Id": request_id}
    body = messages.error_body(error) if request.path.startswith(MESSAGES_PREFIX) else error.body()
    return Response(body, error.status, headers, content_type=JSON)


def _request_id() -> RequestId:
    return request_id_from(request.headers.get("X-Request-Id"))
