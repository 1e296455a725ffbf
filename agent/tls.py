# SPDX-License-Identifier: Apache-2.0
"""The TLS context of an agent's HTTP server."""

from __future__ import annotations

import ssl


class BadCertificate(ValueError):
    """Files that cannot be read, hold no certificate or not its key; the message names them."""


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """A PEM certificate with its chain, and its key without a password. Raises `BadCertificate`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without the empty password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # also what OpenSSL raises
        raise BadCertificate(f"{certificate} and {key} are no certificate and its key: {error}") from error
    return context
