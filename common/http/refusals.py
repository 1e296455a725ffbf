# SPDX-License-Identifier: Apache-2.0
"""Refusals of requests by what their heads say, in words for an API: werkzeug speaks to readers of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from werkzeug.exceptions import HTTPException

_SHOWN_CHARS = 64


def plain_message(error: HTTPException, method: str) -> str:
    """The message of an error of Quart's own, for a request with this method."""
    match error.code:
        case 404:
            return "there is nothing at this path"
        case 405:
            return f"{method} is not allowed for this path"
        case 408:
            return "the body did not arrive in time"
        case 413:
            return "the body is too large"
        case 500:
            return "internal error"
    return error.name.lower()


def encoding_refusal(coding: str | None) -> str | None:
    """Why a body with this `Content-Encoding` is refused; None if it is not encoded."""
    if {each.strip().lower() for each in (coding or "").split(",")} <= {"", "identity"}:
        return None
    return f"the body is compressed ({str(coding)[:_SHOWN_CHARS]}): send it as it is"
