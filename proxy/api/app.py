# SPDX-License-Identifier: Apache-2.0
"""The proxy's HTTP routes. Each reads a request, asks another room, and writes the answer."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from kvferry.proxy.api import openapi
from kvferry.proxy.api.auth import guard
from kvferry.proxy.api.completions import Completions
from kvferry.proxy.api.dashboard import add_operator_page
from kvferry.proxy.errors import NotFound, ProxyError
from kvferry.proxy.exchange.exchange import Services
from kvferry.proxy.fleet.interface import JSON, Page, PageName
from kvferry.proxy.ids import RequestId, request_id_from
from kvferry.proxy.wire.messages import Incarnation

FOLDER = str(Path(__file__).parent)


def create_app(services: Services) -> Quart:
    """The application; `services` must stay open for as long as it serves."""
    # Named paths: Quart cannot look them up in a package that is installed in parts.
    app = Quart(__name__, root_path=FOLDER, instance_path=FOLDER, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = services.config.max_body_bytes
    app.config["BODY_TIMEOUT"] = services.config.body_timeout_s
    # Quart would cut the operator's page off after 60 s.
    app.config["RESPONSE_TIMEOUT"] = None

    @app.get("/v1/models")
    async def models() -> Response:
        return await _page("models", services)

    @app.get("/health")
    async def health() -> Response:
        return Response(b'{"status":"ok"}', content_type=JSON)

    @app.get("/ready")
    async def ready() -> Response:
        return await _page("ready", services)

    @app.get("/nodes")
    async def nodes() -> Response:
        return await _page("nodes", services)

    @app.get("/nodes/targets")
    async def targets() -> Response:
        return await _page("targets", services)

    # Agents of other engines have addresses in their incarnations.
    @app.post("/nodes/<path:incarnation>/drain")
    async def drain(incarnation: str) -> Response:
        return await _drain(services, Incarnation(incarnation), True)

    @app.post("/nodes/<path:incarnation>/undrain")
    async def undrain(incarnation: str) -> Response:
        return await _drain(services, Incarnation(incarnation), False)

    @app.get("/metrics")
    async def exposition() -> Response:
        return await _page("metrics", services)

    description = msgspec.json.encode(openapi.document(version("kvferry")))

    @app.get("/openapi.json")
    async def described() -> Response:
        return Response(description, content_type="application/json")

    add_operator_page(app, services.live)
    if services.api_keys is not None:
        guard(app, services.api_keys)
    app.asgi_app = Completions(services, app.asgi_app)  # type: ignore[method-assign]

    @app.errorhandler(HTTPException)
    async def refuse(error: HTTPException) -> Response:
        refused = _failure(NotFound(error.code or 500, error.description or error.name), _request_id())
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            refused.headers["Allow"] = ", ".join(sorted(error.valid_methods))
        return refused

    return app


async def _page(name: PageName, services: Services) -> Response:
    """A page about the fleet."""
    try:
        return _shown(await services.fleet.page(name))
    except ProxyError as error:
        return _failure(error, _request_id())


async def _drain(services: Services, incarnation: Incarnation, drained: bool) -> Response:
    """Take an agent out of rotation, or put it back; the answer is how it now stands."""
    try:
        return _shown(await services.fleet.drain(incarnation, drained))
    except ProxyError as error:
        return _failure(error, _request_id())


def _shown(page: Page) -> Response:
    return Response(page.body, page.status, content_type=page.content_type)


def _failure(error: ProxyError, request_id: RequestId) -> Response:
    headers = {**error.headers, "X-Request-Id": request_id}
    return Response(error.body(), error.status, headers, content_type=JSON)


def _request_id() -> RequestId:
    return request_id_from(request.headers.get("X-Request-Id"))
