# SPDX-License-Identifier: Apache-2.0
"""Ids of the API process: their types, and how they are made (docs/architecture.md#ids)."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Literal, NewType

from kvferry.common.hashing import Purpose, digest
from kvferry.proxy.wire.registration import Incarnation

RequestId = NewType("RequestId", str)
AnswerId = NewType("AnswerId", str)
AnswerKind = Literal["completion", "chat"]

MAX_ID_CHARS = 128
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
NO_SEED = -1
"""A client's seed that asks for none, as vLLM takes it."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ANSWER_PREFIX: dict[AnswerKind, str] = {"completion": "cmpl", "chat": "chatcmpl"}


def mint_incarnation() -> Incarnation:
    """64 random bits that name one start of one agent."""
    return Incarnation(secrets.token_hex(8))


def mint_request_id() -> RequestId:
    return RequestId(secrets.token_hex(16))


def mint_answer_id(kind: AnswerKind, request_id: RequestId) -> AnswerId:
    """Return the id of a response: it carries the request's, with which a client may name several."""
    return AnswerId(f"{_ANSWER_PREFIX[kind]}-{request_id}-{secrets.token_hex(8)}")


def mint_seed() -> int:
    return secrets.randbits(63)


def is_plain_id(text: str) -> bool:
    """Whether an id from outside may be logged and echoed: 1 to 128 printable ASCII characters."""
    return 0 < len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable()


def host_id() -> str:
    """16 hex digits that are equal for processes of one booted host, and for no others."""
    return digest(Purpose.HOST, _BOOT_ID.read_bytes(), size=8).hex()
