# SPDX-License-Identifier: Apache-2.0
"""Tokens that authorize a peer's ranks to read from ours.

A token is a random nonce and its MAC under a secret that only one agent's own processes know. So
the engine process can mint one in its response to `hello`, without a message to any rank.
"""

from __future__ import annotations

import hmac
import secrets

from kvferry.common.hashing import Purpose, digest

SECRET_BYTES = 32
NONCE_BYTES = 16
_SEAL_BYTES = 32
TOKEN_BYTES = NONCE_BYTES + _SEAL_BYTES


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def mint(secret: bytes) -> bytes:
    """Make one token, `TOKEN_BYTES` long."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _seal(secret, nonce)


def verify(secret: bytes, token: bytes) -> bool:
    """Return whether the token was minted under this secret, in constant time."""
    return len(token) == TOKEN_BYTES and hmac.compare_digest(
        _seal(secret, token[:NONCE_BYTES]), token[NONCE_BYTES:]
    )


def _seal(secret: bytes, nonce: bytes) -> bytes:
    return digest(Purpose.TRANSFER_TOKEN, nonce, size=_SEAL_BYTES, key=secret)
