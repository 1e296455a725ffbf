# SPDX-License-Identifier: Apache-2.0
"""TLS contexts for the servers of proxies and agents, and for the proxy as their client."""

from __future__ import annotations

import ssl
from pathlib import Path


class BadCertificate(ValueError):
    """Files that cannot be read, or hold no certificate or not its key; the message names them."""


def server_context(certificate: Path | str, key: Path | str) -> ssl.SSLContext:
    """For a server: a PEM file with the certificate and its chain, and one with its key, without a password.

    Raises `BadCertificate`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without the empty password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # also what OpenSSL raises
        raise BadCertificate(f"{certificate} and {key} are no certificate and its key: {error}") from error
    return context


def pinned_context(certificate: Path) -> ssl.SSLContext:
    """For a client that trusts this very certificate, whatever its host. Raises `BadCertificate`."""
    context = client_context(certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be an authority's
    return context


def client_context(authority: Path) -> ssl.SSLContext:
    """For a client that trusts only the authorities in this PEM file. Raises `BadCertificate`."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise BadCertificate(f"{authority} is no certificate: {error}") from error
