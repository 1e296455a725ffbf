# SPDX-License-Identifier: Apache-2.0
"""`host:port`, with brackets around an IPv6 address."""

from __future__ import annotations

import re
from ipaddress import IPv6Address

WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that stand for all addresses of a machine; no other machine can dial them."""
MAX_NAME_CHARS = 253
_LABEL = "[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def bracketed(host: str) -> str:
    """The host as URLs spell it."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int | str) -> str:
    """Format host and port as URLs spell them."""
    return f"{bracketed(host)}:{port}"


def check_dialable(host: str) -> None:
    """Raise `ValueError` unless the host is an address, or a name that can be looked up: of ASCII letters,
    digits, hyphens and underscores, with labels of 1 to 63 characters.
    """
    if ":" in host:
        IPv6Address(host)
    elif len(host) > MAX_NAME_CHARS or not _NAME.fullmatch(host):
        raise ValueError(f"host {host!r} cannot be looked up")


def check_host_port(name: str, address: str) -> None:
    """Raise `ValueError`, which names the setting, unless `address` is HOST:PORT.

    The host must be one that can be looked up, and the port be above 0.
    """
    host, _, port = address.rpartition(":")
    try:
        check_dialable(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= 65535
    except ValueError:
        is_port = False
    if not is_port:
        raise ValueError(f"{name} must be HOST:PORT, got {address!r}")
