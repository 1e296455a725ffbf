# SPDX-License-Identifier: Apache-2.0
"""The proxy's HTTP routes. Each reads a request, asks another room, and writes the answer."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import msgspec
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from proxy import metrics, openapi
from proxy.api_keys import guard
from proxy.completions import Completions
from proxy.errors import NotFound, ProxyError
from proxy.exchange import Services
from proxy.ids import RequestId, request_id_from
from proxy.operator_page import add_operator_page
from proxy.pages import models_page, nodes_page, readiness, scrape_targets
from proxy.wire import Incarnation


def create_app(services: Services) -> Quart:
    """The application; `services` must stay open for as long as it serves."""
    app = Quart("proxy")
    app.config["MAX_CONTENT_LENGTH"] = services.config.max_body_bytes
    app.config["BODY_TIMEOUT"] = services.config.body_timeout_s
    # Quart would cut the operator's page off after 60 s.
    app.config["RESPONSE_TIMEOUT"] = None

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(models_page(_snapshot(services)))

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        report = readiness(_snapshot(services))
        return _json(report, 200 if report["ready"] else 503)

    @app.get("/nodes")
    async def nodes() -> Response:
        return _json(nodes_page(_snapshot(services), services.slots, _now()))

    @app.get("/nodes/targets")
    async def targets() -> Response:
        return _json(scrape_targets(_snapshot(services)))

    # Agents of other engines have addresses in their incarnations.
    @app.post("/nodes/<path:incarnation>/drain")
    async def drain(incarnation: str) -> Response:
        return _drain(services, Incarnation(incarnation), True)

    @app.post("/nodes/<path:incarnation>/undrain")
    async def undrain(incarnation: str) -> Response:
        return _drain(services, Incarnation(incarnation), False)

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(services.metrics.exposition(), content_type=metrics.CONTENT_TYPE)

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


def _drain(services: Services, incarnation: Incarnation, drained: bool) -> Response:
    """Take an agent out of rotation, or put it back; the answer is how it now stands."""
    if not services.registry.drain(incarnation, drained):
        return _failure(NotFound(404, f"no agent has the incarnation {incarnation!r}"), _request_id())
    services.admission.pump()
    page = nodes_page(_snapshot(services), services.slots, _now())
    return _json(next(node for node in page["nodes"] if node["incarnation"] == incarnation))


def _failure(error: ProxyError, request_id: RequestId) -> Response:
    headers = {**error.headers, "X-Request-Id": request_id}
    return Response(error.body(), error.status, headers, content_type="application/json")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, content_type="application/json")


def _request_id() -> RequestId:
    return request_id_from(request.headers.get("X-Request-Id"))


def _snapshot(services: Services) -> Any:
    return services.registry.snapshot(_now())


def _now() -> float:
    return asyncio.get_running_loop().time()
