# SPDX-License-Identifier: Apache-2.0
"""Cross-origin requests: which pages of other origins may call the API from a browser.

Source: the Fetch standard, https://fetch.spec.whatwg.org/#http-cors-protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

# `kvferry doctor` runs in an engine's environment, which may not have what the server needs.
if TYPE_CHECKING:
    from kvferry.common.http.server import Header

ANY = "*"
PATHS = ("/v1/", "/tokenize", "/detokenize", "/version")
"""Paths that begin like this are the API. The operator's pages are for their own origin alone."""
EXPOSED = b"X-Request-Id, Retry-After, Server-Timing"
PREFLIGHT_MAX_AGE_S = 600
_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?", re.IGNORECASE)


class CorsPolicy:
    """Allows the API to some origins, such as `https://chat.example.com`, or to all: `*`.

    Raises ValueError for what is no origin.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)
        for origin in origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins: {origin!r} is no origin, as https://chat.example.com is")

    def allows(self, path: str, origin: bytes) -> bool:
        """Whether pages of this origin may call this path."""
        return path.startswith(PATHS) and (ANY.encode() in self._origins or origin.lower() in self._origins)

    def headers(self, path: str, request: Mapping[bytes, bytes]) -> list[Header]:
        """Return what a response gets; nothing where the origin or path is not allowed, or none is named."""
        origin = request.get(b"origin")
        if origin is None or not path.startswith(PATHS):
            return []
        if ANY.encode() in self._origins:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        if origin.lower() not in self._origins:
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight(self, path: str, request: Mapping[bytes, bytes]) -> list[Header] | None:
        """Return what an allowed preflight's response gets beside `headers`; None for any other request."""
        if b"access-control-request-method" not in request:
            return None
        if not any(name == b"access-control-allow-origin" for name, _ in self.headers(path, request)):
            return None
        asked = request.get(b"access-control-request-headers", b"")
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            *([(b"access-control-allow-headers", asked)] if asked else []),
            (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
        ]
