# SPDX-License-Identifier: Apache-2.0
"""What a web page may make its reader's browser send to a server that this browser reaches.

Two ways a page has, of which the server behind a firewall or on 127.0.0.1 knows nothing:

- *DNS rebinding*: the page's own name is given the server's address, so that the browser takes the server for
  the page's origin, and the page reads all of it. The `Host` of such requests is the page's name.
- *Cross-site requests*: a page may send what it cannot read the answer of. Browsers say so in
  `Sec-Fetch-Site`, and over plain HTTP in `Origin` at least. What is no browser sends neither.

Source: the Fetch standard, and Fetch Metadata (https://w3c.github.io/webappsec-fetch-metadata/).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address

ANY = "*"
_SHOWN_CHARS = 253
_PRIVATE = (".localhost", ".local", ".internal")
"""No web site has a name that ends like this, nor one without a dot: no registry gives such names away."""
_SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_NAME = re.compile(r"\.?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{0,5})?", re.IGNORECASE)

Refusal = tuple[str, str]
"""The code and the message of a 403."""


class AllowedHosts:
    """The hosts by which a server may be called, whatever the port: addresses, names that no web site can
    have, this machine's, the one that it is bound to or found by (`own`), and those `named` by the operator.

    An address is no DNS name, which is what rebinding takes. In `named`, `.example.com` stands for all names
    below it, and `*` for any. Raises ValueError for what is neither.
    """

    def __init__(self, named: Iterable[str], own: Iterable[str] = ()) -> None:
        named = tuple(named)
        for each in named:
            if each != ANY and not _NAME.fullmatch(each):
                raise ValueError(f"allowed_hosts: {each!r} is no host name, as gpu-7.example.com is")
        self._any = ANY in named
        self._names = frozenset(each.lower() for each in ("localhost", *named, *own, socket.gethostname()))
        self._suffixes = (*_PRIVATE, *(each.lower() for each in named if each.startswith(".")))

    def __contains__(self, authority: str) -> bool:
        """Whether a `Host` header, or the authority of a request's target, is one of them."""
        if self._any:
            return True
        parts = _AUTHORITY.fullmatch(authority)
        if parts is None:
            return False
        if parts[1] is not None:
            return _is_address(parts[1])
        name = parts[2].lower()
        bare = name.removesuffix(".")
        return "." not in name or bare in self._names or bare.endswith(self._suffixes) or _is_address(bare)


def _trust_nobody(path: str, origin: bytes) -> bool:
    return False


class BrowserGuard:
    """Refuses requests that only another site's page can have caused.

    Args:
        hosts: By which the server may be called; None where requests are authenticated by what no browser
            sends unasked.
        trusts: Whether pages of an origin may send anything to a path.
    """

    def __init__(
        self, hosts: AllowedHosts | None, trusts: Callable[[str, bytes], bool] = _trust_nobody
    ) -> None:
        self._hosts = hosts
        self._trusts = trusts

    def refusal(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Why a request is refused; None if it is not. `target` is that of its first line."""
        authority, path = _split(target)
        host = headers.get(b"host")
        if self._hosts is not None:
            for each in (host, authority):
                if each is not None and (shown := each.decode("latin-1")) not in self._hosts:
                    return (
                        "host_not_allowed",
                        f"{shown[:_SHOWN_CHARS]!r} is no name of this server: see --allowed-hosts",
                    )
        if method not in _SAFE_METHODS and self._is_cross_site(host, path, headers):
            return "cross_site", "a page of another site has sent this request"
        return None

    def _is_cross_site(self, host: bytes | None, path: str, headers: Mapping[bytes, bytes]) -> bool:
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is not None and self._trusts(path, origin):
            return False
        if site is not None:
            return site.lower() not in (b"same-origin", b"none")
        return origin is not None and origin.partition(b"://")[2].lower() != (host or b"").lower()


def _split(target: bytes) -> tuple[bytes | None, str]:
    """The authority of a target in absolute form (None in any other), and its path."""
    if target.startswith(b"/") or b"://" not in target:
        return None, target.decode("latin-1")
    authority, slash, path = target.partition(b"://")[2].partition(b"/")
    return authority, (slash + path).decode("latin-1")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
