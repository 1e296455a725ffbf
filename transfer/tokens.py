# SPDX-License-Identifier: Apache-2.0
"""Tokens that let a peer's ranks read from ours.

A token proves itself: a random nonce and its HMAC under a secret that only one agent's own processes know. So
the engine process can mint one while it answers `hello`, and no rank has to be told before the peer connects.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SECRET_BYTES = 32
NONCE_BYTES = 16
TOKEN_BYTES = NONCE_BYTES + hashlib.sha256().digest_size


def new_secret() -> bytes:
    """Make the secret of one agent."""
    return secrets.token_bytes(SECRET_BYTES)


def mint(secret: bytes) -> bytes:
    """Make one token, `TOKEN_BYTES` long."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _seal(secret, nonce)


def verify(secret: bytes, token: bytes) -> bool:
    """Tell whether the token was minted under this secret; takes the same time whatever differs."""
    return len(token) == TOKEN_BYTES and hmac.compare_digest(
        _seal(secret, token[:NONCE_BYTES]), token[NONCE_BYTES:]
    )


def _seal(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, hashlib.sha256)
