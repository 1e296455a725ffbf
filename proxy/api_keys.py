# SPDX-License-Identifier: Apache-2.0
"""Clients' keys: who may ask for answers, and who may look behind them.

The file that `--api-keys` names holds a key per line; `admin` after a key opens the operator's pages to it
too. Empty lines and lines that begin with `#` are skipped.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
from collections.abc import Mapping
from pathlib import Path

from quart import Quart, Response, request

from proxy.errors import Unauthorized

MIN_KEY_CHARS = 16
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What load balancers and Prometheus ask for; nothing of it says what users asked or were told."""
CLIENT_PATHS = "/v1/"


class BadKeyFile(ValueError):
    """A file of keys that cannot be used; the message names the file, and never a key."""


class Access(enum.IntEnum):
    """How far a request may go. Each includes those before it."""

    NONE = 0
    CLIENT = 1
    ADMIN = 2


class ApiKeys:
    """Which key opens what. Holds digests: looking one up takes as long for a wrong key that begins right."""

    def __init__(self, access: Mapping[bytes, Access]) -> None:
        self._access = access

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a file of keys. Raises `OSError`, and `BadKeyFile` also for a file that admits nobody."""
        access: dict[bytes, Access] = {}
        for number, line in enumerate(path.read_text(errors="surrogateescape").splitlines(), start=1):
            match line.split():
                case []:
                    continue
                case [word, *_] if word.startswith("#"):
                    continue
                case [key] if len(key) >= MIN_KEY_CHARS:
                    access[_digest(key)] = Access.CLIENT
                case [key, "admin"] if len(key) >= MIN_KEY_CHARS:
                    access[_digest(key)] = Access.ADMIN
                case _:
                    raise BadKeyFile(
                        f"{path}, line {number}: not KEY or KEY admin, of {MIN_KEY_CHARS} characters at least"
                    )
        if not access:
            raise BadKeyFile(f"{path} holds no key")
        return cls(access)

    def access(self, authorization: str | None, method: str) -> Access:
        """What a request with this `Authorization` header may do.

        A browser sends the key as the password of Basic. It does so unasked, also on behalf of other sites,
        so that opens nothing but what only reads.
        """
        scheme, _, credentials = (authorization or "").partition(" ")
        match scheme.lower():
            case "bearer":
                key = credentials.strip()
            case "basic" if method in ("GET", "HEAD"):
                key = _password(credentials)
            case _:
                return Access.NONE
        return self._access.get(_digest(key), Access.NONE)


def guard(app: Quart, keys: ApiKeys) -> None:
    """Let in only requests with a key. A path that nobody thought of needs an admin's."""

    @app.before_request
    async def refuse() -> Response | None:
        error = refusal(keys, request.path, request.method, request.headers.get("Authorization"))
        if error is None:
            return None
        return Response(error.body(), error.status, error.headers, content_type="application/json")


def refusal(keys: ApiKeys, path: str, method: str, authorization: str | None) -> Unauthorized | None:
    """Why a request is not let in, or None if it is."""
    needed = _needed(path)
    if keys.access(authorization, method) >= needed:
        return None
    return Unauthorized("no key, or not one that opens this", basic=needed is Access.ADMIN)


def _needed(path: str) -> Access:
    if path in OPEN_PATHS:
        return Access.NONE
    return Access.CLIENT if path.startswith(CLIENT_PATHS) else Access.ADMIN


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
