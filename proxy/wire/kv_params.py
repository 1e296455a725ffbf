# SPDX-License-Identifier: Apache-2.0
"""Members of `kv_transfer_params` and of events that the proxy and an agent must read or write alike."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Make the `usage` of one event of a stream with `continuous_usage_stats`: of its choice, so far."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Token 1 of one choice, as the prefill agent answers it and the decode agent goes on from it.

    `text` is what may be shown so far: empty while a character or a stop string is incomplete. `margin` is
    None for an infinite one (JSON has no infinity). `delta` is a chat's first delta, where that has more than
    a role and the text, and `called` whether it ends with calls that are whole. `stop_reason` is the stop
    string or token that ended the choice.
    """

    id: TokenId
    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    margin: float | None = None
    delta: dict[str, Any] | None = None
    called: bool = False
    stop_reason: str | int | None = None
