# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, each its own authority, made by the `openssl` command."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvferry.common.http.tls import client_context


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate of this machine's loopback address (or of another) and its key."""

    cert: Path
    key: Path

    @property
    def trust(self) -> ssl.SSLContext:
        """The context of a client that trusts this certificate alone."""
        return client_context(self.cert)


def make_certificate(folder: Path, name: str = "server", ip: str = "127.0.0.1") -> Certificate:
    """Make `folder/name.crt` and `folder/name.key`."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{ip}",
         "-out", made.cert, "-keyout", made.key],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return made
