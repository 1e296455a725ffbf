# SPDX-License-Identifier: Apache-2.0
"""`host:port`, with brackets around an IPv6 address."""

from __future__ import annotations


def bracketed(host: str) -> str:
    """The host as URLs spell it."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int | str) -> str:
    """Format host and port as URLs spell them."""
    return f"{bracketed(host)}:{port}"


def check_dialable(host: str) -> None:
    """Raise `ValueError` unless the host can be looked up: ASCII, with labels of 1 to 63 characters."""
    if not host.isascii():
        raise ValueError(f"host {host!r} is not ASCII")
    if ":" not in host:  # IPv6
        host.encode("idna")


def check_host_port(name: str, address: str) -> None:
    """Raise `ValueError`, which names the setting, unless `address` is HOST:PORT with a port above 0."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) <= 65535):
        raise ValueError(f"{name} must be HOST:PORT, got {address!r}")
