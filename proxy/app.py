# SPDX-License-Identifier: Apache-2.0
"""The proxy's HTTP routes. Each reads a request, asks another room, and writes the answer."""

from __future__ import annotations

import asyncio

from quart import Quart, Response, g, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, RequestTimeout

from proxy import sse
from proxy.api_keys import guard
from proxy.errors import BodyTooLarge, BodyTooSlow, NotFound, ProxyError
from proxy.exchange import Answer, Exchange, Services
from proxy.fleet import JSON, Page, PageName
from proxy.ids import Endpoint, RequestId, new_identity, request_id_from
from proxy.openai_api import parse_request
from proxy.operator_page import add_operator_page
from proxy.record import CLIENT_LEFT, Record
from proxy.reply import EventStream
from proxy.wire import Incarnation


def create_app(services: Services) -> Quart:
    """The application; `services` must stay open for as long as it serves."""
    app = Quart("proxy")
    app.config["MAX_CONTENT_LENGTH"] = services.config.max_body_bytes
    app.config["BODY_TIMEOUT"] = services.config.body_timeout_s
    # Quart would cut every stream after 60 s; the exchange has deadlines of its own.
    app.config["RESPONSE_TIMEOUT"] = None

    @app.post("/v1/completions")
    async def completions() -> Response:
        return await _serve("completions", services)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await _serve("chat/completions", services)

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

    add_operator_page(app, services.live)
    if services.api_keys is not None:
        guard(app, services.api_keys)

    @app.errorhandler(HTTPException)
    async def refuse(error: HTTPException) -> Response:
        return _failure(NotFound(error.code or 500, error.description or error.name), _request_id())

    return app


async def _serve(endpoint: Endpoint, services: Services) -> Response:
    """One completion request. The record ends here, or in the `EventStream` that is returned."""
    services.open_requests.join()
    request_id = _request_id()
    record = Record(endpoint, request_id, services.metrics, services.history)
    try:
        return await _respond(endpoint, request_id, record, services)
    except ProxyError as error:
        record.end(error.status, error.code)
        return _failure(error, request_id)
    except asyncio.CancelledError:
        record.end(CLIENT_LEFT, "client_left")
        raise


async def _respond(endpoint: Endpoint, request_id: RequestId, record: Record, services: Services) -> Response:
    if (allowance := g.get("allowance")) is not None:
        record.draw_on(allowance)
    asked = parse_request(endpoint, await _body(services.config.max_body_bytes))
    record.tell_request(asked, show_prompt=services.config.log_prompts)
    traceparent, session = request.headers.get("traceparent"), request.headers.get("X-Session-Id")
    ids = new_identity(endpoint, request_id, asked.seed, traceparent, session)
    exchange = Exchange(services, asked, ids, record)
    if not asked.stream:
        answer = await exchange.answer()
        record.tell_answer(answer.body)
        record.end(200)
        return _whole(answer, request_id)
    events = exchange.events()
    # Awaited before the response is made, so that a failure up to here keeps its status.
    first = await anext(events)
    body = EventStream(first, events, record, exchange.deadline)
    response = Response(body, content_type=sse.CONTENT_TYPE, headers={"X-Request-Id": request_id})
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back
    return response


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


async def _body(limit: int) -> bytes:
    """The request's whole body. Raises `BodyTooLarge` or `BodyTooSlow`."""
    try:
        return await request.get_data(cache=False, as_text=False, parse_form_data=False)
    except RequestEntityTooLarge as error:
        raise BodyTooLarge(f"the body exceeds {limit} bytes") from error
    except RequestTimeout as error:
        raise BodyTooSlow("the body did not arrive in time") from error


def _whole(answer: Answer, request_id: RequestId) -> Response:
    response = Response(answer.body, content_type=answer.content_type, headers={"X-Request-Id": request_id})
    if answer.server_timing is not None:
        response.headers["Server-Timing"] = answer.server_timing
    return response


def _failure(error: ProxyError, request_id: RequestId) -> Response:
    headers = {**error.headers, "X-Request-Id": request_id}
    return Response(error.body(), error.status, headers, content_type=JSON)


def _request_id() -> RequestId:
    return request_id_from(request.headers.get("X-Request-Id"))
