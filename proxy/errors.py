# SPDX-License-Identifier: Apache-2.0
"""The errors of a request, in OpenAI's error format."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Any, ClassVar

import msgspec

from kvferry.common.exceptions import NOT_JSON as NOT_JSON
from kvferry.common.json_errors import explain
from kvferry.proxy.wire.registration import Incarnation

RETRY_AFTER_S = 1
AGENT_BUSY = 503
"""The status of an agent that rejects a request for the time being."""
MAX_AGENT_MESSAGE_CHARS = 2000
"""Of an agent's own words in an error, a code or the like included; engines repeat a whole prompt in them."""
MAX_MESSAGE_CHARS = 4000
"""Of a message, which may repeat what a client or an agent has sent, and of `param`."""
SHOWN_MODELS = 10
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ProxyError(Exception):
    """Why a request failed. Subclasses define the status and a stable code."""

    status: int = 500
    kind: ClassVar[str] = "server_error"
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        message = message[:MAX_MESSAGE_CHARS]
        super().__init__(message)
        self.message = message
        self.param = param and param[:MAX_MESSAGE_CHARS]

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

    @classmethod
    def of_json(cls, error: BaseException, where: str = "", hint: str = "") -> InvalidRequest:
        """The error for a body that is not the JSON that it should be, or its part at `where`."""
        problem = explain(error, where)
        return cls(problem.message + hint, param=problem.field)

    @classmethod
    def of_field(cls, error: BaseException, name: str) -> InvalidRequest:
        """The error for a field that is not the JSON that it should be."""
        return cls(explain(error, name).message, param=name)


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
    """No agent serves the requested model. The message lists the first models that are `served`: any client
    may see them at `/v1/models`.
    """

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str, served: Iterable[str]) -> None:
        names = nsmallest(SHOWN_MODELS + 1, served)
        more = ", …" if len(names) > SHOWN_MODELS else ""
        shown = ", ".join(map(repr, names[:SHOWN_MODELS])) + more or "none"
        super().__init__(f"no agent serves this model: {model!r}; models served now: {shown}", param="model")


class NotFound(ProxyError):
    """The path or agent does not exist, or not in this way."""

    kind = "invalid_request_error"
    code = "not_found"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class WrongMethod(ProxyError):
    """The path exists, for another method."""

    status = 405
    kind = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self._allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": self._allowed}


class RefusedPage(ProxyError):
    """Only a page of another site can have caused the request."""

    status = 403
    kind = "invalid_request_error"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CannotDrain(ProxyError):
    """The agent takes no request to drain from a proxy."""

    status = 409
    kind = "invalid_request_error"
    code = "cannot_drain"


class RoleFixed(ProxyError):
    """The agent registered with one role, and keeps it."""

    status = 409
    kind = "invalid_request_error"
    code = "role_fixed"


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


class UnsupportedEncoding(ProxyError):
    """The request's body is compressed."""

    status = 415
    kind = "invalid_request_error"
    code = "unsupported_media_type"

    @property
    def headers(self) -> dict[str, str]:
        return {"Accept-Encoding": "identity"}


class NoAgent(ProxyError):
    """The model is known, but no agents can serve it now."""

    status = 503
    code = "no_agent"

    def __init__(self, message: str, *, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class OutOfDescriptors(ProxyError):
    """This proxy may open no more connections: no agent has failed."""

    status = 503
    code = "out_of_descriptors"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)}


class TooManyBodies(ProxyError):
    """More large bodies wait to be read than may, or this one has waited for too long."""

    status = 503
    code = "too_many_bodies"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)}


class TooManyResponses(ProxyError):
    """The proxy holds too much of servers' responses, most of it of this one."""

    status = 503
    code = "too_many_responses"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)}


class TooManyViewers(ProxyError):
    """The dashboard has as many viewers as it serves at once."""

    status = 503
    code = "too_many_viewers"


class Overloaded(ProxyError):
    """Every agent that could serve is at its limit, and the queue is full or did not advance in time; or the
    first token would come later than the client wants it.
    """

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

    `not_connected`: the agent never got the request. `connection_refused`: for it accepts no connections.
    `unresponsive`: the request was aborted, since the agent's pings have stopped or it makes no progress
    (`proxy.http.hang_detector`).
    """

    status = 502
    code = "agent_lost"

    def __init__(
        self,
        message: str,
        agent: Incarnation,
        *,
        not_connected: bool = False,
        connection_refused: bool = False,
        unresponsive: bool = False,
        status: int = 502,
    ) -> None:
        super().__init__(message)
        self.agent = agent
        self.not_connected = not_connected
        self.connection_refused = connection_refused
        self.unresponsive = unresponsive
        self.status = status if status in (503, 504) else 502

    @property
    def is_down(self) -> bool:
        """Whether the agent does no work at all, so that retrying elsewhere adds no load to the cluster."""
        return self.connection_refused or self.unresponsive

    @property
    def may_be_caused(self) -> bool:
        """Whether the request itself may have made the agent fail. A 503 rejects it for the time being."""
        return not self.not_connected and self.status != 503


class AgentBusy(AgentLost):
    """An agent rejected the request with a 503 for the time being: back-pressure, no failure of the agent.

    `retry_after_s` is its `Retry-After`.
    """

    code = "agent_busy"

    def __init__(self, message: str, agent: Incarnation, retry_after_s: int | None = None) -> None:
        super().__init__(message, agent, status=503)
        self.retry_after_s = RETRY_AFTER_S if retry_after_s is None else retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class SuspectRequest(ProxyError):
    """Agents died or fell silent while they served the request, as many as one request may cost.

    Its status is not one that gateways retry, and OpenAI's clients, which retry any 5xx, go by the header.
    """

    status = 500
    code = "suspect_request"

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Should-Retry": "false"}


class KvUnproven(AgentLost):
    """Nothing shows that KV was still its prompt's when it was read: the response was discarded.

    It says nothing about the health of the agent that a retry is to avoid.
    """

    code = "kv_unproven"

    def __init__(self, message: str, agent: Incarnation) -> None:
        super().__init__(message, agent, status=503)


class LeaseUnknown(ProxyError):
    """The servers do not say how long they keep KV, nor does the operator."""

    status = 503
    code = "lease_unknown"


class StreamBroken(ProxyError):
    """An agent was lost in mid-stream, and no further migration is allowed."""

    status = 502
    code = "stream_broken"


class BadResponse(ProxyError):
    """An agent's response violates its dialect."""

    status = 502
    code = "bad_agent_answer"

    @classmethod
    def of_json(cls, error: BaseException, what: str) -> BadResponse:
        """The error for `what` of an agent's that is not the JSON that it should be."""
        return cls(f"{what} cannot be read: {explain(error, whole='it').message}")


class BusyResponse(BadResponse):
    """An agent's response says, under HTTP 200, that it rejects the request for the time being."""


class AnswerDiverged(ProxyError):
    """A retried prefill sampled another first token than the one that was already sent to the client."""

    status = 502
    code = "answer_diverged"


class AgentTimeout(ProxyError):
    """A deadline passed while waiting for an agent."""

    status = 504
    code = "agent_timeout"


class AgentRejected(ProxyError):
    """An agent rejected the request with a 4xx, which is passed through to the client.

    `error` is the agent's, whose code and message this has; None where its body has none. `retry_after_s` is
    its `Retry-After`.
    """

    kind = "invalid_request_error"
    code = "agent_refused"

    def __init__(self, status: int, error: AgentError | None, retry_after_s: int | None = None) -> None:
        super().__init__(f"the agent returned HTTP {status}" if error is None else error.message)
        self.status = status
        if error is not None and error.code is not None:
            self.code = str(error.code)
        self.error = error
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def body(self) -> bytes:
        """The agent's own error object, or a generic one if its body contains none."""
        return super().body() if self.error is None else msgspec.json.encode({"error": self.error})


class AgentError(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent's body says of an error, in OpenAI's shape and of bounded size."""

    message: str = "no reason given"
    type: str | None = None
    param: str | None = None
    code: str | int | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it would be a 503, had the response not begun with a 200."""
        return self.code == AGENT_BUSY


def agent_error(raw: bytes) -> AgentError | None:
    """The error in an agent's JSON body; None if it has none.

    It is the `error` member, or the whole of a body whose `object` is "error" (SGLang), or `detail`, as
    FastAPI says why it refused a request before the engine had it. What is not of OpenAI's types is left out,
    and what is long is shortened.
    """
    try:
        members = _MEMBERS.decode(raw)
        is_error = bytes(members.get("object", b"")) == b'"error"'
        error = msgspec.json.decode(raw if is_error else members.get("error", b"null"))
        if error is None:
            error = _detail(members.get("detail", b"null"))
    except NOT_JSON:
        return None
    if isinstance(error, str) and error:
        error = {"message": error}
    if not isinstance(error, dict):
        return None
    shown: dict[str, Any] = {
        name: shorten(value) if isinstance(value, str) else value
        for name in ("message", "type", "param", "code")
        if isinstance(value := error.get(name), str) or (name == "code" and type(value) is int)
    }
    return AgentError(**shown)


class _Invalid(msgspec.Struct):
    """One of FastAPI's: where in the request, and what is wrong there."""

    msg: str
    loc: tuple[str | int, ...] = ()


def _detail(raw: bytes | msgspec.Raw) -> dict[str, Any] | str | None:
    """Read FastAPI's `detail`: a text, an object with an error's members, or a list of what is invalid."""
    try:
        invalid = msgspec.json.decode(raw, type=list[_Invalid])
    except msgspec.ValidationError:
        detail = msgspec.json.decode(raw)
        return detail if isinstance(detail, str | dict) else None
    places = [".".join(str(part) for part in each.loc if part != "body") for each in invalid]
    reasons = [
        f"{place}: {each.msg}" if place else each.msg for place, each in zip(places, invalid, strict=True)
    ]
    return {"message": "; ".join(reasons), "param": next(filter(None, places), None)} if reasons else None


def shorten(text: str) -> str:
    """An agent's words, as far as they are passed on."""
    return text if len(text) <= MAX_AGENT_MESSAGE_CHARS else text[: MAX_AGENT_MESSAGE_CHARS - 1] + "…"
