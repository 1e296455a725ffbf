# SPDX-License-Identifier: Apache-2.0
"""The ids that the proxy generates; no other module generates any."""

from __future__ import annotations

import os
import re
import time
from typing import Literal, NewType

import msgspec

RequestId = NewType("RequestId", str)
AnswerId = NewType("AnswerId", str)
TransferId = NewType("TransferId", str)

Endpoint = Literal["completions", "chat/completions"]
Api = Endpoint | Literal["messages", "responses"]
"""What a client has asked; `messages` and `responses` are served as chats."""

MAX_REQUEST_ID_CHARS = 128
MAX_ANSWER_ID_CHARS = 128
"""Longer ones agents do not take over."""
# W3C Trace Context, as of version 00.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ANSWER_PREFIX: dict[Endpoint, str] = {"completions": "cmpl-", "chat/completions": "chatcmpl-"}


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies one request, the same on every leg and attempt.

    `created` is in Unix seconds. `seed` makes sampling reproducible, so a retry samples the same tokens (I4).
    `session`: the client's `X-Session-Id`, for the policy that keeps a session's requests on one agent.
    """

    request_id: RequestId
    answer_id: AnswerId
    created: int
    seed: int
    traceparent: str | None = None
    session: str | None = None


def new_transfer_id() -> TransferId:
    """128 random bits, one per attempt, never reused."""
    return TransferId(os.urandom(16).hex())


def request_id_from(header: str | None) -> RequestId:
    """The client's `X-Request-Id` if it is short and printable, else a new one."""
    if header and len(header) <= MAX_REQUEST_ID_CHARS and header.isascii() and header.isprintable():
        return RequestId(header)
    return RequestId(os.urandom(16).hex())


def new_identity(
    endpoint: Endpoint,
    request_id: RequestId,
    seed: int | None,
    traceparent: str | None,
    session: str | None = None,
) -> Identity:
    """Generate the ids and, if the request has none, a seed in 0 … 2^63-1.

    The response's id has the request's in it, but where that were too long, and is another one for each
    response: clients may send one request id with many requests.
    An invalid `traceparent` is dropped.
    """
    answer_id = f"{_ANSWER_PREFIX[endpoint]}{request_id}-{os.urandom(8).hex()}"
    if len(answer_id) > MAX_ANSWER_ID_CHARS:
        answer_id = _ANSWER_PREFIX[endpoint] + os.urandom(16).hex()
    return Identity(
        request_id=request_id,
        answer_id=AnswerId(answer_id),
        created=int(time.time()),
        seed=int.from_bytes(os.urandom(8)) >> 1 if seed is None else seed,
        traceparent=traceparent if traceparent and _TRACEPARENT.fullmatch(traceparent) else None,
        session=session,
    )
