# SPDX-License-Identifier: Apache-2.0
"""The proxy's OpenAPI document, served at `/openapi.json`.

Request schemas are generated from the structs that validate requests. Completions pass through from agents,
so only the fields that all of them have are described.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.proxy.canary.pair_record import CanaryReport, ProbeReport
from kvferry.proxy.request import MAX_CHOICES, MAX_MODEL_CHARS, ChatRequest, CompletionRequest, Message
from kvferry.proxy.sse import CONTENT_TYPE

JSON = "application/json"
_REF = "#/components/schemas/{name}"
_REF_MESSAGE = {"$ref": _REF.format(name="Message")}


class ErrorDetail(msgspec.Struct):
    """`code` is stable; `message` is for people."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail


class CompletionResponse(msgspec.Struct):
    """A completion as OpenAI defines it, including its choices."""

    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class VersionResponse(msgspec.Struct):
    version: str


class TokenizeRequest(msgspec.Struct):
    """Of a text, or of the prompt of a chat (`messages`); as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class HealthResponse(msgspec.Struct):
    status: Literal["ok"]


class ReadinessResponse(msgspec.Struct):
    """`waiting`: for each model that cannot be served, the reason."""

    ready: bool
    waiting: dict[str, str]


class NodeLoadView(msgspec.Struct):
    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_blocks_leased: int
    max_running: int | None


class NodeWorkView(msgspec.Struct):
    """What routing knows of an agent's work: what it has measured, or else another one of its model.

    Seconds of a prompt's token, of a step that decodes, of each sequence in it, and of a pull; tokens of
    an answer on average. The shares: of its time in the last 10 s or so, what went into prompts and into
    decoding. Then the seconds of a step that computes prompts, and of each token in it.
    """

    token_s: float | None
    step_s: float | None
    sequence_s: float | None
    answer_tokens: float
    pull_s: float
    prefill_share: float
    decode_share: float
    prompt_step_s: float | None = None
    prompt_token_s: float | None = None


class NodeView(msgspec.Struct):
    """One agent, as this proxy sees it. `address` ends with `#RANK` where it is one rank (`dp_rank`) of a
    server's. `pulls`: KV transfers to it since it started that were proven right; `failed_pulls`: the others,
    by reason.
    """

    address: str
    role: Literal["prefill", "decode", "both"]
    state: str
    breaker: str
    dialect: str
    model: str
    incarnation: str
    load: NodeLoadView
    in_flight: int
    last_ping_s: float
    not_paired: str | None
    name: str = ""  # older proxies do not say it, nor what follows
    control: str = ""
    dp_rank: int | None = None
    prefill_chunk: int | None = None
    work: NodeWorkView | None = None
    pulls: int = 0
    failed_pulls: dict[str, int] = {}

    @property
    def url(self) -> str:
        """Of its API."""
        return self.address.partition("#")[0].rstrip("/")


class IncompatiblePairView(msgspec.Struct):
    prefill: str
    decode: str
    reason: str


class RejectedAgentView(msgspec.Struct):
    """An agent whose registrations are rejected."""

    address: str
    control: str
    role: str
    reason: str
    count: int
    last_ping_s: float


class DownServerView(msgspec.Struct):
    """A configured server of another engine that is down."""

    address: str
    role: str
    reason: str


class EventView(msgspec.Struct):
    """What happened to an agent, `count` times in a row, the last time `age_s` seconds ago."""

    kind: str
    agent: str
    name: str
    address: str
    role: str
    model: str
    detail: str
    count: int
    age_s: float


class NodeList(msgspec.Struct):
    """`lost`: agents whose pings stopped, until one announces itself at their address. `events`: the latest
    first.
    """

    nodes: list[NodeView]
    refused_pairings: list[IncompatiblePairView]
    num_refused_pairings: int
    rejected_agents: list[RejectedAgentView]
    down: list[DownServerView]
    lost: list[EventView] = []
    events: list[EventView] = []


class TargetGroup(msgspec.Struct):
    """A target group of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


RESPONSES = (
    ErrorResponse,
    CompletionResponse,
    ModelList,
    VersionResponse,
    TokenizeRequest,
    TokenizeResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    HealthResponse,
    ReadinessResponse,
    NodeView,
    EventView,
    NodeList,
    TargetGroup,
    CanaryReport,
    ProbeReport,
)
_FAILURES = {
    "400": "The request is invalid.",
    "401": "An API key with access to this path is required.",
    "404": "No agent serves the model.",
    "408": "The head or the body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "417": "Anything but `100-continue` was expected.",
    "429": "All agents are busy, or the key's rate limit is reached; see `Retry-After`.",
    "431": "The head is too large.",
    "4XX": "The agent rejected the request.",
    "500": "Internal error of the proxy.",
    "502": "An agent failed, or sent an invalid response.",
    "503": "No pair of agents can serve the model now.",
    "504": "An agent did not respond in time.",
}
_EVENT = {"description": "One event.", "type": "object", "properties": {"data": {"type": "string"}}}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "description": "Text, token ids, or a batch of either; `n` times the size of the batch is limited too.",
    "anyOf": [
        _TEXT,
        _TOKEN_IDS,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_CHOICES},
    ],
}


_NULL = {"type": "null"}
_UNDECODED = {
    "kv_transfer_params": _NULL,
    "resume": _NULL,
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _NULL]},
    "logit_bias": {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, _NULL]},
}
"""What the structs hold as JSON; of the rest of that (`tools`, `documents`) the proxy checks nothing."""
_CLOSED = {"additionalProperties": False}
_MESSAGES = {"type": "array", "items": _REF_MESSAGE, "minItems": 1}


def document(version: str) -> dict[str, Any]:
    """The document, ready to be encoded as JSON."""
    targets = _json({"type": "array", "items": _ref("TargetGroup")})
    feed = {"description": "One snapshot per second.", "content": {CONTENT_TYPE: {"schema": _EVENT}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvferry proxy",
            "version": version,
            "description": "OpenAI-compatible API for prefill/decode disaggregated serving.",
        },
        "paths": {
            "/v1/completions": {"post": _completion("Complete a prompt", "CompletionRequest")},
            "/v1/chat/completions": {"post": _completion("Answer a chat", "ChatRequest")},
            "/v1/messages": {"post": _messages()},
            "/v1/messages/count_tokens": {"post": _count_tokens()},
            "/v1/responses": {"post": _responses()},
            "/v1/models": {"get": _page("List the models that ready agents serve", "ModelList")},
            "/v1/models/{model}": {"get": _one_model()},
            "/tokenize": {
                "post": _from_agent("Tokenize a text or a chat", "TokenizeRequest", "TokenizeResponse")
            },
            "/detokenize": {
                "post": _from_agent("Turn tokens into text", "DetokenizeRequest", "DetokenizeResponse")
            },
            "/version": {"get": _page("Show the version", "VersionResponse")},
            "/health": {"get": _page("Check that the proxy is alive", "HealthResponse")},
            "/ready": {"get": _page("Check that requests can be served", "ReadinessResponse", also="503")},
            "/nodes": {"get": _page("List all agents, and why some are not paired", "NodeList")},
            "/nodes/targets": {"get": _operation("List the agents as Prometheus targets", {"200": targets})},
            "/nodes/{incarnation}/cordon": {
                "post": _cordoning("Cordon an agent: this proxy sends it nothing new")
            },
            "/nodes/{incarnation}/uncordon": {"post": _cordoning("Uncordon an agent")},
            "/nodes/{incarnation}/role/{role}": {"post": _pinning()},
            "/nodes/{incarnation}/drain": {"post": _draining()},
            "/canary": {
                "get": _page("Show how the answers of each pair compare", "CanaryReport"),
                "post": _probing(),
            },
            "/metrics": {
                "get": _operation("Metrics in Prometheus' text format", {"200": _text("text/plain")})
            },
            "/openapi.json": {"get": _operation("This document", {"200": _json({"type": "object"})})},
            "/ui": {"get": _operation("The operator's dashboard", {"200": _text("text/html")})},
            "/ui/events": {
                "get": _operation(
                    "The dashboard's event feed", {"200": feed, "503": _error("Too many viewers.")}
                )
            },
            "/ui/requests/{request_id}": {"get": _one_request()},
            "/ui/agents/{incarnation}": {
                "get": _of_agent("All that is known of one agent", {"200": _json({"type": "object"})})
            },
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(
        (CompletionRequest, ChatRequest, Message, *RESPONSES), ref_template=_REF
    )
    for name in ("CompletionRequest", "ChatRequest"):
        properties = schemas[name]["properties"]
        properties |= _UNDECODED
        # `stream_options` is allowed with `stream` only.
        schemas[name]["if"] = {
            "required": ["stream_options"],
            "properties": {"stream_options": {"type": "object"}},
        }
        schemas[name]["then"] = {"required": ["stream"], "properties": {"stream": {"const": True}}}
    schemas["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    schemas["ChatRequest"]["properties"]["messages"] = _MESSAGES
    return schemas


def _completion(summary: str, body: str) -> dict[str, Any]:
    response = {
        "description": "The completion; as a stream of events if `stream` is true.",
        "headers": {
            name: {"schema": {"type": "string"}, "description": why}
            for name, why in {
                "X-Request-Id": "The client's own, or a generated one.",
                "Server-Timing": "How long routing, prefill and decode took.",
            }.items()
        },
        "content": {JSON: {"schema": _ref("CompletionResponse")}, CONTENT_TYPE: {"schema": _EVENT}},
    }
    failures = {status: _error(why) for status, why in _FAILURES.items()}
    operation = _operation(summary, {"200": response, **failures})
    operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(body)}}}
    return operation


def _messages_prompt() -> dict[str, Any]:
    """Anthropic's own documents describe bodies and answers whole; here is what a plain request has."""
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": {"type": "string"}},
    }
    return {
        "model": {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_CHARS},
        "messages": {"type": "array", "items": message | _CLOSED, "minItems": 1},
        "system": {"type": "string"},
    }


def _messages() -> dict[str, Any]:
    properties = {
        **_messages_prompt(),
        "max_tokens": {"type": "integer", "minimum": 1},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "stop_sequences": {"type": "array", "items": {"type": "string"}},
        "stream": {"type": "boolean"},
    }
    required = ["model", "max_tokens", "messages"]
    schema = {"type": "object", "required": required, "properties": properties} | _CLOSED
    return _translated("Answer a chat in the format of Anthropic's Messages", schema, _anthropics_failures())


def _count_tokens() -> dict[str, Any]:
    schema = {"type": "object", "required": ["model", "messages"], "properties": _messages_prompt()} | _CLOSED
    count = {"type": "object", "properties": {"input_tokens": {"type": "integer"}}}
    summary = "Count the tokens of a prompt in the format of Anthropic's Messages"
    operation = _operation(summary, {"200": _json(count), **_anthropics_failures()})
    operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


def _anthropics_failures() -> dict[str, Any]:
    return {status: {**_json({"type": "object"}), "description": why} for status, why in _FAILURES.items()}


def _responses() -> dict[str, Any]:
    """OpenAI's own document describes bodies and answers whole; here is what a plain request has."""
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "type": {"const": "message"},
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": {"type": "string"},
        },
    }
    items = {"type": "array", "items": message | _CLOSED, "minItems": 1}
    properties = {
        "model": {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_CHARS},
        "input": {"anyOf": [{"type": "string"}, items]},
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": {"anyOf": [{"type": "integer", "minimum": 1}, _NULL]},
        "temperature": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, _NULL]},
        "store": {"enum": [False, None]},
        "stream": {"type": ["boolean", "null"]},
    }
    schema = {"type": "object", "required": ["model", "input"], "properties": properties} | _CLOSED
    failures = {status: _error(why) for status, why in _FAILURES.items()}
    return _translated("Answer in the format of OpenAI's Responses", schema, failures)


def _translated(summary: str, schema: dict[str, Any], failures: dict[str, Any]) -> dict[str, Any]:
    response = _json({"type": "object"})
    response["content"][CONTENT_TYPE] = {"schema": _EVENT}
    operation = _operation(summary, {"200": response, **failures})
    operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


def _cordoning(summary: str) -> dict[str, Any]:
    return _of_agent(summary, {"200": _json(_ref("NodeView"))})


def _pinning() -> dict[str, Any]:
    responses = {"200": _json(_ref("NodeView")), "409": _error("The agent registered with one role.")}
    operation = _of_agent("Use an agent of role `both` for one role alone, or for both again", responses)
    role = {"type": "string", "enum": ["prefill", "decode", "both"]}
    operation["parameters"].append({"name": "role", "in": "path", "required": True, "schema": role})
    return operation


def _draining() -> dict[str, Any]:
    responses = {
        "202": _json(_ref("NodeView")),
        "409": _error("The proxy cannot drain this agent."),
    }
    return _of_agent("Drain an agent: it finishes what it has, and stops", responses)


def _probing() -> dict[str, Any]:
    responses = {
        "200": _json(_ref("ProbeReport")),
        "404": _error("No pair is up that can be probed."),
        "429": _error("Too many probes wait for their turn."),
    }
    parameter = {"name": "model", "in": "query", "required": False, "schema": _TEXT}
    summary = "Compare the answer of a pair with that of its decode server alone; pairs take turns"
    return {**_operation(summary, responses), "parameters": [parameter]}


def _of_agent(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    responses = {**responses, "404": _error("No agent has this incarnation.")}
    schema = {"type": "string", "minLength": 1}
    parameter = {"name": "incarnation", "in": "path", "required": True, "schema": schema}
    return {**_operation(summary, responses), "parameters": [parameter]}


def _one_request() -> dict[str, Any]:
    responses = {
        "200": _json({"type": "object"}),
        "404": _error("No request with this id is among the latest."),
    }
    parameter = {"name": "request_id", "in": "path", "required": True, "schema": _TEXT}
    summary = "Where one of the latest requests went, by its `X-Request-Id`"
    return {**_operation(summary, responses), "parameters": [parameter]}


def _one_model() -> dict[str, Any]:
    responses = {"200": _json(_ref("ModelCard")), "404": _error(_FAILURES["404"])}
    parameter = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    return {**_operation("Describe one model", responses), "parameters": [parameter]}


def _from_agent(summary: str, body: str, schema: str) -> dict[str, Any]:
    failures = {status: _error(why) for status, why in _FAILURES.items()}
    operation = _operation(summary, {"200": _json(_ref(schema)), **failures})
    operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(body)}}}
    return operation


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
    return {"description": why, "content": {JSON: {"schema": _ref("ErrorResponse")}}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}
