# SPDX-License-Identifier: Apache-2.0
"""Log probabilities in the two shapes of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.agent.ids import AnswerKind
from kvferry.agent.messages.requests import PromptLogprob, TokenLogprob

# JSON has no infinity; OpenAI's reference documents this value for tokens that cannot be sampled.
_LOWEST = -9999.0

TokensWithLogprobs = Sequence[tuple[int, TokenLogprob]]
EchoedTokens = Sequence[tuple[int, TokenLogprob | None]]
"""Nothing is known of a prompt's first token."""


def completion_logprobs(
    tokenizer: Tokenizer, sampled: TokensWithLogprobs | EchoedTokens, text_offset: int
) -> dict[str, Any]:
    """Make the object of a completion's choice: parallel lists, one entry per token.

    The sampled token is always among its alternatives, so there may be one more than asked for. `text_offset`
    is where the first token begins, counted in characters of the tokens so far, each read by itself.
    """
    tokens = [tokenizer.token_text(token_id) for token_id, _ in sampled]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if logprob is None else _finite(logprob.logprob) for _, logprob in sampled],
        "top_logprobs": [
            None if logprob is None else _alternatives(tokenizer, token_id, logprob)
            for token_id, logprob in sampled
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, sampled: TokensWithLogprobs, text_offset: int) -> dict[str, Any]:
    """Make the object of a chat choice: one entry per token with its bytes and its likeliest alternatives."""
    content = []
    for token_id, logprob in sampled:
        entry = _chat_entry(tokenizer, token_id, logprob.logprob)
        entry["top_logprobs"] = [_chat_entry(tokenizer, other, value) for other, value in logprob.top]
        content.append(entry)
    return {"content": content}


RENDER_LOGPROBS: dict[AnswerKind, Callable[[Tokenizer, TokensWithLogprobs, int], dict[str, Any]]] = {
    "completion": completion_logprobs,
    "chat": chat_logprobs,
}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[PromptLogprob], num_top: int
) -> list[dict[str, Any] | None]:
    """Make vLLM's `prompt_logprobs`: by token id, of each token of the prompt and its `num_top` likeliest.

    The first token has none, so `logprobs` are those of the tokens after it.
    """
    shown: list[dict[str, Any] | None] = [None]
    for token_id, own in zip(prompt_ids[1:], logprobs, strict=True):
        top = [(other, value, rank) for rank, (other, value) in enumerate(own.top[:num_top], start=1)]
        shown.append(
            {
                str(other): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(other),
                }
                for other, value, rank in [(token_id, own.logprob, own.rank), *top]
            }
        )
    return shown


def merge_logprobs(earlier: dict[str, Any] | None, later: dict[str, Any] | None) -> dict[str, Any] | None:
    """Join two objects of one choice; either may be missing."""
    if earlier is None or later is None:
        return earlier or later
    return {key: earlier[key] + later[key] for key in later}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _alternatives(tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob) -> dict[str, float]:
    # Several tokens may have one text (broken characters do); the likeliest one is shown.
    shown = {tokenizer.token_text(other): _finite(value) for other, value in reversed(logprob.top)}
    shown.setdefault(tokenizer.token_text(token_id), _finite(logprob.logprob))
    return dict(sorted(shown.items(), key=lambda item: -item[1]))


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
