# SPDX-License-Identifier: Apache-2.0
"""Everything that can go wrong with a request, as the client is told it (OpenAI's error shape)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvferry.proxy.wire.messages import Incarnation

RETRY_AFTER_S = 1
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the JSON asked for; not only its own errors."""


class ProxyError(Exception):
    """A request that ends without an answer. Subclasses fix the status and a stable code."""

    status: int = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP answer, beside its content type."""
        return {}

    def body(self) -> bytes:
        """The JSON body `{"error": {...}}`; also the payload of the error event in a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class InvalidRequest(ProxyError):
    """The client's body cannot be served as it stands."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"


class Unauthorized(ProxyError):
    """The proxy asks for keys, and the request brought none that opens what it asks for."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, message: str, *, basic: bool) -> None:
        super().__init__(message)
        self.basic = basic

    @property
    def headers(self) -> dict[str, str]:
        """For what people look at, a browser is told to ask them; programs send the key as Bearer."""
        scheme = (
            'Basic realm="kvferry: an admin key as password", charset="UTF-8"' if self.basic else "Bearer"
        )
        return {"WWW-Authenticate": scheme}


class ModelNotFound(ProxyError):
    """No agent serves the model that was asked for."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class NotFound(ProxyError):
    """No such path or method."""

    kind = "invalid_request_error"
    code = "not_found"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WrongMethod(NotFound):
    """The path is there, for another method."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(405, message)
        self._allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": self._allowed}


class HeadTooSlow(ProxyError):
    """The client began a request and did not send its head in time."""

    status = 408
    kind = "invalid_request_error"
    code = "head_timeout"


class HeadTooLarge(ProxyError):
    """The request's line and headers are over the limit."""

    status = 431
    kind = "invalid_request_error"
    code = "head_too_large"


class BodyTooSlow(ProxyError):
    """The client did not send its body in time."""

    status = 408
    kind = "invalid_request_error"
    code = "body_timeout"


class BodyTooLarge(ProxyError):
    """The request's body is over the limit."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class NoAgent(ProxyError):
    """The model is known, but no pair of agents can serve it now."""

    status = 503
    code = "no_agent"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)}


class TooManyViewers(ProxyError):
    """The operator's page is looked at by as many as it serves at once."""

    status = 503
    code = "too_many_viewers"


class Overloaded(ProxyError):
    """Every agent that could serve has all that it can run, and the queue for them is no help."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class RateLimited(ProxyError):
    """The client's key has asked for as much as it may for now."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self._retry_after_s)}


class AgentLost(ProxyError):
    """An agent broke the connection before the end of its leg, or reported a failure: the request may be
    retried.

    `connection_refused`: it accepts no connections. `unresponsive`: the request was aborted, since the
    agent's pings have stopped (`proxy.http.hang_detector`).
    """

    status = 502
    code = "agent_lost"

    def __init__(
        self,
        message: str,
        agent: Incarnation,
        *,
        connection_refused: bool = False,
        unresponsive: bool = False,
        status: int = 502,
    ) -> None:
        super().__init__(message)
        self.agent = agent
        self.connection_refused = connection_refused
        self.unresponsive = unresponsive
        self.status = status if status in (503, 504) else 502

    @property
    def is_down(self) -> bool:
        """Whether the agent does no work at all, so that retrying elsewhere adds no load to the cluster."""
        return self.connection_refused or self.unresponsive


class StreamBroken(ProxyError):
    """An agent broke off in mid-answer, and no other may be asked any more."""

    status = 502
    code = "stream_broken"


class BadResponse(ProxyError):
    """An agent answered, but not in its dialect."""

    status = 502
    code = "bad_agent_answer"


class AnswerDiverged(ProxyError):
    """A retried prefill drew another first token than the one that the client already has."""

    status = 502
    code = "answer_diverged"


class AgentTimeout(ProxyError):
    """A deadline passed while waiting for an agent."""

    status = 504
    code = "agent_timeout"


class AgentRejected(ProxyError):
    """An agent answered 4xx: its verdict on the client's request is passed through as it is."""

    kind = "invalid_request_error"
    code = "agent_refused"

    def __init__(self, status: int, content_type: str, raw: bytes, retry_after: str | None) -> None:
        super().__init__(f"the agent answered HTTP {status}")
        self.status = status
        self.content_type = content_type
        self.raw = raw
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": self.retry_after}

    def body(self) -> bytes:
        """The agent's own error object, or one of ours around a body that is none."""
        return (
            msgspec.json.encode({"error": parsed}) if (parsed := error_object(self.raw)) else super().body()
        )


def error_object(raw: bytes) -> dict[str, object] | None:
    """The `error` member of a JSON error body, or None if it has none."""
    try:
        body = msgspec.json.decode(raw, type=dict[str, object])
    except NOT_JSON:
        return None
    error = body.get("error")
    return error if isinstance(error, dict) else None
