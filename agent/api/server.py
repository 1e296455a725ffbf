# SPDX-License-Identifier: Apache-2.0
"""The agent's HTTP routes, and the server that runs them. What the routes do is in `frontend`."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, g, request
from quart.wrappers.response import ResponseBody
from werkzeug.exceptions import HTTPException

from kvferry.agent.announce.membership import Membership
from kvferry.agent.api.engine_client import EngineClient
from kvferry.agent.api.frontend import Frontend, RequestIds
from kvferry.agent.api.metrics import AgentMetrics
from kvferry.agent.api.openai_schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    decode_detokenize_body,
    decode_tokenize_body,
)
from kvferry.agent.api.request_log import RequestLogEntry
from kvferry.agent.config import AgentConfig
from kvferry.agent.errors import ApiError, bad_request
from kvferry.agent.ids import MAX_ID_CHARS, AnswerId, RequestId, is_plain_id, mint_request_id
from kvferry.common.addresses import host_port
from kvferry.common.exceptions import NOT_JSON
from kvferry.common.http.browser_guard import AllowedHosts, BrowserGuard
from kvferry.common.http.refusals import encoding_refusal, plain_message
from kvferry.common.http.server import GuardedConnection, HttpServer, ServerBounds
from kvferry.common.json_errors import explain
from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.wire.registration import Incarnation

if TYPE_CHECKING:
    from kvferry.common.telemetry.spans import Tracing

log = logging.getLogger(__name__)

_BODY_TIMEOUT_S = 60
_HEAD_TIMEOUT_S = 30
# Longer than any client keeps an unused connection: the side that reuses it should be the one to close it.
_KEEP_ALIVE_S = 120
_BACKLOG = 2048
# For load balancers and Prometheus: these carry nothing of what users sent or got.
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class DropBody(msgspec.Struct, frozen=True):
    """POST /kv/drop: a transfer whose reader will not come, and the incarnation that leased it."""

    transfer_id: str
    incarnation: str


class EventBody(ResponseBody):
    """The body of a stream whose first event is known: status and headers are sent after that one."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._rest = rest

    async def __aenter__(self) -> EventBody:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._rest.aclose()

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        async for event in self._rest:
            yield event


def create_app(
    *,
    config: AgentConfig,
    incarnation: Incarnation,
    frontend: Frontend,
    engine: EngineClient,
    membership: Membership,
    metrics: AgentMetrics,
    drain: Callable[[], None],
    bearer: str | None = None,
    tracing: Tracing | None = None,
) -> Quart:
    """The Quart application of one agent.

    Args:
        drain: Lets the agent finish what it has, and end.
        bearer: When given, only requests with that token are served.
        tracing: When given, every request has a span.
    """
    app = Quart("agent", static_folder=None)
    app.config["RESPONSE_TIMEOUT"] = None  # streams may be long; the engine keeps every request's deadline
    app.config["BODY_TIMEOUT"] = _BODY_TIMEOUT_S
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes
    started = int(time.time())

    async def generate(body_type: type[GenerationBody]) -> Response:
        traceparent = request.headers.get("traceparent", "")
        span = None
        if tracing is not None:
            about = {
                "http.request.method": "POST",
                "http.route": request.path,
                "kvferry.request_id": g.request_id,
            }
            headers = {name: request.headers.get(name, "") for name in ("traceparent", "tracestate")}
            span = tracing.serve(f"POST {request.path}", time.monotonic(), headers, about)
        entry = RequestLogEntry(
            metrics, g.request_id, traceparent if is_plain_id(traceparent) else None, span
        )
        with entry.closed_on_failure():
            max_model_len = None if engine.ready is None else engine.ready.max_model_len
            body = await frontend.decode(await _read_body(), body_type, max_model_len)
            if config.log_prompts:
                entry.show_prompt(msgspec.json.encode(body.given_prompt))
            ids = _request_ids()
            if body.stream:
                events = frontend.events(body, ids, entry)
                return Response(EventBody(await anext(events), events), headers=_EVENT_STREAM)
            completion, timing = await frontend.complete(body, ids, entry)
            return _json(msgspec.json.encode(completion), headers={"Server-Timing": timing} if timing else {})

    @app.post("/v1/completions")
    async def completions() -> Response:
        return await generate(CompletionBody)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await generate(ChatBody)

    def card() -> dict[str, Any]:
        model: dict[str, Any] = {
            "id": config.model_name,
            "object": "model",
            "created": started,
            "owned_by": "kvferry",
        }
        if engine.ready is not None:
            model["max_model_len"] = engine.ready.max_model_len
        return model

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(msgspec.json.encode({"object": "list", "data": [card()]}))

    # A path, since models may be named by theirs.
    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        if name != config.model_name:
            message = f"this agent does not serve the model {name!r}, but {config.model_name!r}"
            raise ApiError(404, "model_not_found", message, "model")
        return _json(msgspec.json.encode(card()))

    @app.get("/version")
    async def version_page() -> Response:
        return _json(msgspec.json.encode({"version": VERSION}))

    @app.post("/tokenize")
    async def tokenize() -> Response:
        max_model_len = None if engine.ready is None else engine.ready.max_model_len
        body = decode_tokenize_body(await _read_body(), max_model_len)
        return _json(msgspec.json.encode(await frontend.tokenize(body)))

    @app.post("/detokenize")
    async def detokenize() -> Response:
        body = decode_detokenize_body(await _read_body())
        return _json(msgspec.json.encode(await frontend.detokenize(body)))

    @app.post("/kv/drop")
    async def drop() -> Response:
        try:
            body = msgspec.json.decode(await _read_body(), type=DropBody)
        except NOT_JSON as error:
            raise bad_request(explain(error).message) from error
        if body.incarnation != incarnation:
            raise ApiError(409, "wrong_incarnation", f"this agent is {incarnation}", "incarnation")
        if not is_plain_id(body.transfer_id):
            raise bad_request(f"transfer_id must be 1 to {MAX_ID_CHARS} printable characters", "transfer_id")
        frontend.drop(body.transfer_id)
        return _json(b'{"dropped":true}')

    @app.post("/drain")
    async def start_drain() -> Response:
        drain()
        return _json(msgspec.json.encode({"state": "draining", "incarnation": incarnation}), status=202)

    @app.get("/health")
    async def health() -> Response:
        return _json(msgspec.json.encode({"status": "alive", "incarnation": incarnation}))

    @app.get("/ready")
    async def ready() -> Response:
        status = 200 if membership.state == "ready" else 503
        return _json(msgspec.json.encode({"state": membership.state}), status=status)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.before_request
    async def name_request() -> None:
        given = request.headers.get("X-Request-Id", "")
        g.request_id = RequestId(given) if is_plain_id(given) else mint_request_id()

    @app.before_request
    async def check_token() -> None:
        if bearer is None or request.path in _OPEN_PATHS:
            return
        given = request.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {bearer}".encode()):
            raise ApiError(401, "unauthorized", "this agent serves only the proxies of its cluster")

    @app.after_request
    async def echo_request_id(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        return response

    @app.errorhandler(ApiError)
    async def on_api_error(error: ApiError) -> Response:
        return _json(msgspec.json.encode(error.body()), status=error.status, headers=error.headers())

    @app.errorhandler(HTTPException)
    async def on_http_exception(error: HTTPException) -> Response:
        code = error.name.lower().replace(" ", "_")
        return await on_api_error(ApiError(error.code or 500, code, plain_message(error, request.method)))

    return app


def create_server(
    app: Quart, tls: ssl.SSLContext | None = None, hosts: AllowedHosts | None = None
) -> HttpServer:
    """The server for `app`; run it with `serve(sockets=[listener])`, end it with `should_exit = True`.

    `hosts` are those by which it may be called; None where it serves only who has the cluster's token.
    """
    return HttpServer(
        uvicorn.Config(
            app,
            http=cast(
                Any,
                partial(
                    GuardedConnection,
                    head_s=_HEAD_TIMEOUT_S,
                    bounds=ServerBounds(),
                    browser_guard=BrowserGuard(hosts),
                ),
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )


def listen_http(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket: clients can connect from now on. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host_port(host, port)}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


async def _read_body() -> bytes:
    """Read the request's body. Raises 415 when it is compressed; Quart raises 413 when it is over the limit,
    408 when it does not come.
    """
    if refusal := encoding_refusal(request.headers.get("Content-Encoding")):
        raise ApiError(415, "unsupported_media_type", refusal)
    try:
        data = await request.get_data(cache=False)
    finally:
        # Of a request that has ended, be it that its body was dropped, garbage collection would find it late.
        request.body.clear()
    assert isinstance(data, bytes)
    return data


def _request_ids() -> RequestIds:
    """Read the ids that a proxy has minted from its headers. Raises `ApiError` 400 if they are unusable."""
    answer_id = request.headers.get("X-Kvferry-Answer-Id")
    created = request.headers.get("X-Kvferry-Created")
    if answer_id is not None and not is_plain_id(answer_id):
        raise bad_request("X-Kvferry-Answer-Id must be short and printable", "X-Kvferry-Answer-Id")
    if created is not None and not (created.isascii() and created.isdecimal() and len(created) < 16):
        raise bad_request("X-Kvferry-Created must be Unix seconds", "X-Kvferry-Created")
    return RequestIds(
        request_id=g.request_id,
        answer_id=AnswerId(answer_id) if answer_id is not None else None,
        created=int(created) if created is not None else None,
    )


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status=status, headers={**(headers or {}), "Content-Type": "application/json"})
