# SPDX-License-Identifier: Apache-2.0
"""API keys: who may send requests, at which rate, and who may see and operate the fleet.

The file that `--api-keys` names holds a key per line, and after it, in any order and each at most once:
`admin`, which also admits it to the operator's pages, `requests=RATE` and `tokens=RATE`
(`proxy.api.rate_limit`), `priority=N`, the lowest that its requests may have, and `cache-ttl=SECONDS`, the
longest for which their KV is kept. Empty lines and lines that begin with `#` are skipped.
"""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.common.hashing import Purpose, digest
from kvferry.proxy.api.rate_limit import Rate, RateLimit
from kvferry.proxy.errors import Unauthorized
from kvferry.proxy.request import MIN_PRIORITY, RequestHead, parse_cache_ttl, parse_priority

MIN_KEY_CHARS = 16
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
"""For load balancers, Prometheus and client generators; they reveal nothing that users sent."""
CLIENT_PATHS = frozenset({"/detokenize", "/tokenize", "/version"})
CLIENT_PREFIX = "/v1/"
MESSAGES_PREFIX = "/v1/messages"
"""Of Anthropic's API."""
_DIGEST_BYTES = 32
_ID_BYTES = 8


class BadKeyFile(ValueError):
    """A key file that cannot be used; the message names the file, and never a key."""


class Access(enum.IntEnum):
    """What a key gives access to. Each level includes those before it."""

    NONE = 0
    CLIENT = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Client:
    """The holder of a key. `salt_key`: by which the salts of its requests are made (`proxy.request`).
    `id`: tells it from others. `min_priority`: no request of its goes before those of that priority.
    `max_cache_ttl_s`: the longest `cache_ttl_s` of its requests; None: the proxy's.
    """

    access: Access
    rate_limit: RateLimit | None
    salt_key: bytes | None
    id: bytes
    min_priority: int
    max_cache_ttl_s: float | None = None


ANONYMOUS = Client(Access.NONE, None, None, b"", MIN_PRIORITY)


class ApiKeys:
    """The clients by their keys' digests, so that the time of a lookup reveals nothing about the keys."""

    def __init__(self, clients: Mapping[bytes, Client]) -> None:
        self._clients = clients

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a key file. Raises `OSError`, or `BadKeyFile`, also for a file without keys."""
        clients: dict[bytes, Client] = {}
        for number, line in enumerate(path.read_text(errors="surrogateescape").splitlines(), start=1):
            match line.split():
                case []:
                    continue
                case [word, *_] if word.startswith("#"):
                    continue
                case [key, *words] if len(key) >= MIN_KEY_CHARS:
                    try:
                        clients[_digest(key)] = _client(key, words)
                    except ValueError as error:
                        raise BadKeyFile(f"{path}, line {number}, after the key: {error}") from error
                case _:
                    raise BadKeyFile(f"{path}, line {number}: a key has {MIN_KEY_CHARS} characters at least")
        if not clients:
            raise BadKeyFile(f"{path} contains no key")
        return cls(clients)

    def client(self, authorization: str | None, method: str) -> Client:
        """The client of a request with this `Authorization` header.

        A browser sends the key as the password of Basic. It attaches it also to requests that other sites
        cause, so Basic is accepted only for methods that read.
        """
        scheme, _, credentials = (authorization or "").partition(" ")
        match scheme.lower():
            case "bearer":
                key = credentials.strip()
            case "basic" if method in ("GET", "HEAD"):
                key = _password(credentials)
            case _:
                return ANONYMOUS
        return self._clients.get(_digest(key), ANONYMOUS)


def admin_key(path: Path) -> str:
    """Return the first admin's key of a file. Raises `OSError`, or `BadKeyFile`, also if it has none."""
    keys = ApiKeys.read(path)
    for line in path.read_text(errors="surrogateescape").splitlines():
        key = line.split()[:1]
        if key and keys.client(f"Bearer {key[0]}", "GET").access is Access.ADMIN:
            return key[0]
    raise BadKeyFile(f"{path} has no admin's key, which the list of agents needs")


def authenticate(keys: ApiKeys, head: RequestHead) -> Client:
    """Return the client of a request. Raises `Unauthorized`.

    A path that is not listed here needs an admin's key. Anthropic's clients send theirs in a header of their
    own.
    """
    authorization, given = head.header(b"authorization"), head.header(b"x-api-key")
    if given is not None and head.path.startswith(MESSAGES_PREFIX):
        authorization = f"Bearer {given}"
    needed = _needed(head.path)
    client = keys.client(authorization, head.method)
    if client.access < needed:
        message = "no API key, or one without access to this path"
        raise Unauthorized(message, basic=needed is Access.ADMIN)
    return client


def _client(key: str, words: Sequence[str]) -> Client:
    """Parse the words after a key. Raises `ValueError`."""
    access, rates, priority, ttl_s = Access.CLIENT, dict[str, Rate](), None, None
    for word in words:
        name, _, value = word.partition("=")
        if word == "admin" and access is Access.CLIENT:
            access = Access.ADMIN
        elif name in ("requests", "tokens") and name not in rates:
            rates[name] = Rate.parse(value)
        elif name == "priority" and priority is None:
            priority = parse_priority(value)
        elif name == "cache-ttl" and ttl_s is None:
            ttl_s = parse_cache_ttl(value)
        else:
            raise ValueError(
                "only admin, requests=RATE, tokens=RATE, priority=N and cache-ttl=SECONDS are allowed, "
                "each once"
            )
    salt_key = digest(Purpose.SALT_KEY, _raw(key), size=_DIGEST_BYTES)
    rate_limit = RateLimit(rates.get("requests"), rates.get("tokens")) if rates else None
    return Client(access, rate_limit, salt_key, _digest(key)[:_ID_BYTES], priority or 0, ttl_s)


def _needed(path: str) -> Access:
    if path in OPEN_PATHS:
        return Access.NONE
    is_client = path in CLIENT_PATHS or path.startswith(CLIENT_PREFIX)
    return Access.CLIENT if is_client else Access.ADMIN


def _digest(key: str) -> bytes:
    return digest(Purpose.API_KEY, _raw(key), size=_DIGEST_BYTES)


def _raw(key: str) -> bytes:
    """The bytes of a key, as they stand in the file."""
    return key.encode("utf-8", "surrogateescape")


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
