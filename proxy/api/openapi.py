# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document that the proxy serves of itself, at `/openapi.json`.

Requests are described by the very structs that check them. Answers that agents give pass through, so only
what every one of them has is described.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.proxy.request import MAX_CHOICES, Chat, Completion
from kvferry.proxy.sse import CONTENT_TYPE

JSON = "application/json"
_REF = "#/components/schemas/{name}"


class ErrorDetail(msgspec.Struct):
    """What went wrong. `code` is stable; `message` is for people."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(msgspec.Struct):
    error: ErrorDetail


class Answer(msgspec.Struct):
    """A whole answer; its choices are as OpenAI's."""

    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Health(msgspec.Struct):
    status: Literal["ok"]


class Readiness(msgspec.Struct):
    """`waiting`: for each model that cannot be served, why."""

    ready: bool
    waiting: dict[str, str]


class NodeLoad(msgspec.Struct):
    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_blocks_leased: int
    max_running: int | None


class NodeView(msgspec.Struct):
    """One agent, as this proxy sees it."""

    address: str
    role: Literal["prefill", "decode", "both"]
    state: str
    drained: bool
    breaker: str
    dialect: str
    model: str
    incarnation: str
    load: NodeLoad
    in_flight: int
    last_ping_s: float
    not_paired: str | None


class RefusedPairing(msgspec.Struct):
    prefill: str
    decode: str
    reason: str


class RefusedAgentView(msgspec.Struct):
    """An agent that pings in vain."""

    address: str
    control: str
    role: str
    reason: str
    count: int
    last_ping_s: float


class DownServer(msgspec.Struct):
    """A server of another engine that is named to the proxy and is down."""

    address: str
    role: str
    reason: str


class Nodes(msgspec.Struct):
    nodes: list[NodeView]
    refused_pairings: list[RefusedPairing]
    refused_agents: list[RefusedAgentView]
    down: list[DownServer]


class Target(msgspec.Struct):
    """One group of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


ANSWERS = (Error, Answer, Models, Health, Readiness, NodeView, Nodes, Target)
_FAILURES = {
    "400": "The body cannot be served as it stands.",
    "401": "The proxy asks for a key, and none came that opens this.",
    "404": "No agent serves the model.",
    "408": "The head or the body did not arrive in time.",
    "413": "The body is too large.",
    "429": "All agents are busy, or the key's allowance is used up; `Retry-After` says for how long.",
    "431": "The head is too large.",
    "4XX": "The agent's own verdict on the request.",
    "500": "The proxy failed; its log says why.",
    "502": "An agent failed, or answered nonsense.",
    "503": "No pair of agents can serve the model now.",
    "504": "An agent did not answer in time.",
}
_EVENT = {"description": "Of each event.", "type": "object", "properties": {"data": {"type": "string"}}}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "description": "Text, or token ids, or a batch of such; `n` times their number is limited, as `n` is.",
    "anyOf": [
        _TEXT,
        _TOKEN_IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_CHOICES},
    ],
}


def document(version: str) -> dict[str, Any]:
    """The whole document, ready to be encoded as JSON."""
    targets = _json({"type": "array", "items": _ref("Target")})
    feed = {"description": "A snapshot a second.", "content": {CONTENT_TYPE: {"schema": _EVENT}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvferry proxy",
            "version": version,
            "description": "Takes OpenAI requests through a pair of prefill and decode agents.",
        },
        "paths": {
            "/v1/completions": {"post": _completion("Complete a prompt", "Completion")},
            "/v1/chat/completions": {"post": _completion("Answer a chat", "Chat")},
            "/v1/models": {"get": _page("The models that ready agents serve", "Models")},
            "/health": {"get": _page("Whether the proxy is alive", "Health")},
            "/ready": {"get": _page("Whether a pair can serve", "Readiness", also="503")},
            "/nodes": {"get": _page("Every agent, and why it is not paired", "Nodes")},
            "/nodes/targets": {"get": _operation("The agents, for Prometheus", {"200": targets})},
            "/nodes/{incarnation}/drain": {"post": _draining("Give an agent nothing new")},
            "/nodes/{incarnation}/undrain": {"post": _draining("Give a drained agent work again")},
            "/metrics": {"get": _operation("Prometheus' text format", {"200": _text("text/plain")})},
            "/openapi.json": {"get": _operation("This document", {"200": _json({"type": "object"})})},
            "/ui": {"get": _operation("The operator's page", {"200": _text("text/html")})},
            "/ui/events": {"get": _operation("Its feed", {"200": feed, "503": _error("Enough look at it.")})},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components((Completion, Chat, *ANSWERS), ref_template=_REF)
    for name in ("Completion", "Chat"):
        properties = schemas[name]["properties"]
        properties["kv_transfer_params"] = properties["resume"] = {"type": "null"}
        # Options of a stream are for a stream.
        schemas[name]["if"] = {
            "required": ["stream_options"],
            "properties": {"stream_options": {"type": "object"}},
        }
        schemas[name]["then"] = {"required": ["stream"], "properties": {"stream": {"const": True}}}
    schemas["Completion"]["properties"]["prompt"] = _PROMPT
    return schemas


def _completion(summary: str, body: str) -> dict[str, Any]:
    answered = {
        "description": "The answer; as a stream of events if `stream` is true.",
        "headers": {
            name: {"schema": {"type": "string"}, "description": why}
            for name, why in {
                "X-Request-Id": "The client's own, or a new one.",
                "Server-Timing": "How long routing, prefill and decode took.",
            }.items()
        },
        "content": {JSON: {"schema": _ref("Answer")}, CONTENT_TYPE: {"schema": _EVENT}},
    }
    failures = {status: _error(why) for status, why in _FAILURES.items()}
    operation = _operation(summary, {"200": answered, **failures})
    operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(body)}}}
    return operation


def _draining(summary: str) -> dict[str, Any]:
    responses = {"200": _json(_ref("NodeView")), "404": _error("No agent has this incarnation.")}
    schema = {"type": "string", "minLength": 1}
    parameter = {"name": "incarnation", "in": "path", "required": True, "schema": schema}
    return {**_operation(summary, responses), "parameters": [parameter]}


def _page(summary: str, schema: str, also: str | None = None) -> dict[str, Any]:
    responses = {"200": _json(_ref(schema))}
    if also is not None:
        responses[also] = _json(_ref(schema))
    return _operation(summary, responses)


def _operation(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": {"401": _error(_FAILURES["401"]), **responses}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "OK", "content": {JSON: {"schema": schema}}}


def _text(content_type: str) -> dict[str, Any]:
    return {"description": "OK", "content": {content_type: {"schema": {"type": "string"}}}}


def _error(why: str) -> dict[str, Any]:
    return {"description": why, "content": {JSON: {"schema": _ref("Error")}}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}
