# SPDX-License-Identifier: Apache-2.0
"""Errors of the API process: one exception, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 2000
"""Longest message, which may repeat what a client has sent, and longest `param`."""
_TYPES = {409: "conflict_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request's terminal error: an HTTP status before the first byte of the response, an event after it.

    Args:
        status: The HTTP status.
        code: A stable word for programs.
        message: A sentence for people.
        param: The field of the body at fault, if one is.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        message = message[:MAX_MESSAGE_CHARS]
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param and param[:MAX_MESSAGE_CHARS]

    def body(self) -> dict[str, Any]:
        """Return the body, as OpenAI's clients expect it."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the status: `Retry-After` for 429 and 503, what is accepted for 415."""
        if self.status == 415:
            return {"Accept-Encoding": "identity"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The client must change the body."""
    return ApiError(400, code, message, param)


def unavailable(code: str, message: str) -> ApiError:
    """The agent cannot accept any request now."""
    return ApiError(503, code, message)
