# SPDX-License-Identifier: Apache-2.0
"""TLS contexts: for those who connect to the proxy, and for the agents that it connects to."""

from __future__ import annotations

import ssl
from pathlib import Path


class BadCertificate(ValueError):
    """Files that cannot be read, hold no certificate or not its key; the message names them."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """For a server: a PEM certificate with its chain, and its key, which has no password.

    Raises `BadCertificate`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without the empty password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # also what OpenSSL raises
        raise BadCertificate(f"{certificate} and {key} are no certificate and its key: {error}") from error
    return context


def client_context(authority: Path) -> ssl.SSLContext:
    """For a client that trusts only what the authorities in this PEM file signed. Raises `BadCertificate`."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise BadCertificate(f"{authority} is no certificate: {error}") from error
