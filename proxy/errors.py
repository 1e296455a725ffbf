# SPDX-License-Identifier: Apache-2.0
"""The errors of a request, in OpenAI's error format."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvferry.proxy.wire.messages import Incarnation

RETRY_AFTER_S = 1
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected JSON; not only its own errors."""


class ProxyError(Exception):
    """Why a request failed. Subclasses define the status and a stable code."""

    status: int = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP response, besides its content type."""
        return {}

    def body(self) -> bytes:
        """The JSON body `{"error": {...}}`; also the payload of the error event in a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class InvalidRequest(ProxyError):
    """The request's body is invalid, or asks for something unsupported."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"


class Unauthorized(ProxyError):
    """The proxy requires API keys, and the request has none with access to its path."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, message: str, *, basic: bool) -> None:
        super().__init__(message)
        self.basic = basic

    @property
    def headers(self) -> dict[str, str]:
        """Pages make a browser prompt for the key; programs send it as Bearer."""
        scheme = (
            'Basic realm="kvferry: an admin key as password", charset="UTF-8"' if self.basic else "Bearer"
        )
        return {"WWW-Authenticate": scheme}


class ModelNotFound(ProxyError):
    """No agent serves the requested model."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class NotFound(ProxyError):
    """The path, method or agent does not exist."""

    kind = "invalid_request_error"
    code = "not_found"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WrongMethod(NotFound):
    """The path exists, for another method."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(405, message)
        self._allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": self._allowed}


class BodyTooSlow(ProxyError):
    """The client did not send the request's body in time."""

    status = 408
    kind = "invalid_request_error"
    code = "body_timeout"


class BodyTooLarge(ProxyError):
    """The request's body exceeds the limit."""

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


class OutOfDescriptors(ProxyError):
    """This proxy may open no more connections: no agent has failed."""

    status = 503
    code = "out_of_descriptors"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)}


class TooManyViewers(ProxyError):
    """The dashboard has as many viewers as it serves at once."""

    status = 503
    code = "too_many_viewers"


class Overloaded(ProxyError):
    """Every agent that could serve is at its limit, and the queue is full or did not advance in time."""

    status = 429
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class RateLimited(ProxyError):
    """The client's key has reached its rate limit."""

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
    """An agent was lost in mid-stream, and no further migration is allowed."""

    status = 502
    code = "stream_broken"


class BadResponse(ProxyError):
    """An agent's response violates its dialect."""

    status = 502
    code = "bad_agent_answer"


class AnswerDiverged(ProxyError):
    """A retried prefill sampled another first token than the one that was already sent to the client."""

    status = 502
    code = "answer_diverged"


class AgentTimeout(ProxyError):
    """A deadline passed while waiting for an agent."""

    status = 504
    code = "agent_timeout"


class AgentRejected(ProxyError):
    """An agent rejected the request with a 4xx, which is passed through to the client."""

    kind = "invalid_request_error"
    code = "agent_refused"

    def __init__(self, status: int, content_type: str, raw: bytes, retry_after: str | None) -> None:
        super().__init__(f"the agent returned HTTP {status}")
        self.status = status
        self.content_type = content_type
        self.raw = raw
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": self.retry_after}

    def body(self) -> bytes:
        """The agent's own error object, or a generic one if its body contains none."""
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
