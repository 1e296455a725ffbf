# SPDX-License-Identifier: Apache-2.0
"""What a prefill's engine tells the decode's beside the KV, as the transfer plane carries it.

A decode leg that came after the prefill was told token 1 by its proxy; one that came before learns it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.agent.engine.messages import SamplingParams, Token, TokenLogprob
from kvferry.transfer.first_tokens import FirstToken, FirstTokens


def to_hand_over(tokens: Sequence[Token], cached_tokens: int) -> FirstTokens:
    """Token 1 of every choice, in order of their index."""
    return FirstTokens(choices=tuple(_told(token) for token in tokens), cached_tokens=cached_tokens)


def handed_over(first: FirstTokens, sampling: SamplingParams, vocab_size: int) -> tuple[Token, ...] | None:
    """The tokens as if they had been drawn here.

    None if they cannot be this request's: another number of choices, unknown ids, or no choice that goes on,
    for which a prefill pins nothing.
    """
    if len(first.choices) != sampling.n or any(token.id >= vocab_size for token in first.choices):
        return None
    if sampling.max_tokens == 1 or all(token.finish for token in first.choices):
        return None
    return tuple(_heard(index, token) for index, token in enumerate(first.choices))


def _told(token: Token) -> FirstToken:
    if token.logprob is None:
        return FirstToken(id=token.token_id, finish=token.finish)
    return FirstToken(
        id=token.token_id,
        finish=token.finish,
        logprob=token.logprob.logprob,
        margin=token.logprob.margin,
        top=token.logprob.top,
    )


def _heard(index: int, token: FirstToken) -> Token:
    logprob = None
    if token.logprob is not None:
        logprob = TokenLogprob(logprob=token.logprob, margin=token.margin, top=token.top)
    return Token(index=index, token_id=token.id, logprob=logprob, finish=token.finish)
