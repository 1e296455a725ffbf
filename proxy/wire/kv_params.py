# SPDX-License-Identifier: Apache-2.0
"""The members of `kv_transfer_params` that the proxy and an agent must read alike."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Token 1 of one choice, as the prefill agent answers it and the decode agent goes on from it.

    `text` is what may be shown so far: empty while a character or a stop string is incomplete. `margin` is
    None for an infinite one (JSON has no infinity).
    """

    id: TokenId
    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    margin: float | None = None
