# SPDX-License-Identifier: Apache-2.0
"""The tokens that a prefill sampled, for a reader whose request began before there were any.

They come with the last blocks of a lease (`opened{state: ready}`). The plane only carries them: a reader may
have them from its own request.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_CHOICES = 128
MAX_ALTERNATIVES = 20
MAX_ROW_BYTES = 1 << 18

_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]


class SampledToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token 1 of one choice. `finish`: why the choice has ended with it; None if it continues.

    `logprob` is None if none was requested; then `margin` and `top` mean nothing. `margin` is how far the
    token's score lay above the second best, `top` the likeliest ids with their log probabilities.
    """

    id: _Id
    finish: Literal["stop", "length"] | None = None
    logprob: float | None = None
    margin: float = float("inf")
    top: Annotated[tuple[tuple[_Id, float], ...], Meta(max_length=MAX_ALTERNATIVES)] = ()


class SampledTokens(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Token 1 of every choice, in order of their index, and how much of the prompt was cached there.

    `row` is what another engine keeps of them, in its own format. Left out where empty: older readers know
    none.
    """

    choices: Annotated[tuple[SampledToken, ...], Meta(min_length=1, max_length=MAX_CHOICES)]
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    row: Annotated[bytes, Meta(max_length=MAX_ROW_BYTES)] = b""
