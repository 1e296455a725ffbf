# SPDX-License-Identifier: Apache-2.0
"""Log probabilities in the two shapes of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvferry.agent.api.text.detokenizer import text_stream
from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.agent.ids import AnswerKind
from kvferry.agent.messages.requests import PromptLogprob, TokenLogprob

# JSON has no infinity; OpenAI's reference documents this value for tokens that cannot be sampled.
_LOWEST = -9999.0

TokensWithLogprobs = Sequence[tuple[int, TokenLogprob]]
EchoedTokens = Sequence[tuple[int, TokenLogprob | None]]
"""Nothing is known of a prompt's first token."""


def completion_logprobs(
    tokenizer: Tokenizer,
    sampled: TokensWithLogprobs | EchoedTokens,
    offsets: Sequence[int],
    *,
    by_id: bool = False,
) -> dict[str, Any]:
    """Make the object of a completion's choice: parallel lists, one entry per token.

    The sampled token is always among its alternatives, so there may be one more than asked for.

    Args:
        tokenizer: The model's.
        sampled: The tokens.
        offsets: Where each begins in the text of the choice.
        by_id: Name tokens by their ids.
    """
    return {
        "tokens": [_name(tokenizer, token_id, by_id=by_id) for token_id, _ in sampled],
        "token_logprobs": [None if logprob is None else _finite(logprob.logprob) for _, logprob in sampled],
        "top_logprobs": [
            None if logprob is None else _alternatives(tokenizer, token_id, logprob, by_id=by_id)
            for token_id, logprob in sampled
        ],
        "text_offset": list(offsets),
    }


def chat_logprobs(
    tokenizer: Tokenizer, sampled: TokensWithLogprobs, offsets: Sequence[int], *, by_id: bool = False
) -> dict[str, Any]:
    """Make the object of a chat choice: one entry per token with its bytes and its likeliest alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": _id_name(token_id) if by_id else tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for token_id, logprob in sampled:
        top = [entry(other, value) for other, value in logprob.top]
        content.append({**entry(token_id, logprob.logprob), "top_logprobs": top})
    return {"content": content}


def echoed_offsets(tokenizer: Tokenizer, prompt_ids: Sequence[int], echo: str) -> list[int]:
    """Return where each token of a prompt begins in its text: special tokens may be in it, or not."""
    stream, offsets = text_stream(tokenizer, show_special=True), []
    for token_id in prompt_ids:
        is_special = token_id in tokenizer.special_ids
        if is_special and not echo.startswith(tokenizer.token_text(token_id), stream.num_chars):
            offsets.append(stream.num_chars)
        else:
            stream.push(token_id)
            offsets.append(stream.token_begin)
    return [min(offset, len(echo)) for offset in offsets]


RENDER_LOGPROBS: dict[AnswerKind, Callable[..., dict[str, Any]]] = {
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


def _alternatives(
    tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob, *, by_id: bool
) -> dict[str, float]:
    """Return the sampled token and the likeliest ones by name; of two with one name, one goes by its id."""
    shown = {_name(tokenizer, token_id, by_id=by_id): _finite(logprob.logprob)}
    for other, value in logprob.top:
        if other != token_id:
            name = _name(tokenizer, other, by_id=by_id)
            shown[_id_name(other) if name in shown else name] = _finite(value)
    return dict(sorted(shown.items(), key=lambda item: -item[1]))


def _name(tokenizer: Tokenizer, token_id: int, *, by_id: bool) -> str:
    """Return a token's name in a completion: its text, or as OpenAI does, the bytes that are no text."""
    if by_id:
        return _id_name(token_id)
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in spelled)


def _id_name(token_id: int) -> str:
    """Return a token's name as vLLM writes it for `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"
