# SPDX-License-Identifier: Apache-2.0
"""What routing knows of a request, and what it answers. There is no tokenizer here: lengths of text are
estimates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from kvferry.common.hashing import Purpose, chain, digest
from kvferry.proxy.fleet.snapshot import Node, Prediction
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.wire.registration import Incarnation, Register

NO_AGENTS: frozenset[Incarnation] = frozenset()
BYTES_PER_TOKEN = 4
"""Bytes of ordinary text per token of a large vocabulary; other text is misjudged by a small factor."""
CHUNK_TOKENS = 64
MAX_CHUNKS = 512
_DIGEST_BYTES = 8
_BRACKETS_AND_SPACE = b"[] \t\r\n"
_OF_TOKEN_IDS = b"0123456789," + _BRACKETS_AND_SPACE
_TEXTS = msgspec.json.Decoder(list[str])


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What policies choose by.

    `prompt` is the client's own: text, token ids, a list of either, or a chat's messages, or JSON of these.
    It is read only for `tokens` and `chunks`. `n`: how many sequences it makes, of how many `prompts`.
    `one_token`: one token of each is enough. `undivided`: one agent should serve all of it. `session`: the
    client's session id.
    `cache_salt`: agents share prefixes only among requests with the same one. `ttft_s` and `tpot_s`: the
    client's objectives, the time to the first token and per token; None leaves the fleet's. `max_tokens`: of
    each sequence, at most; None if the client has set no limit. Where requests wait, those of a lower
    `priority` go first, and those of one `key`, the client's, share with others. `is_kept`: its KV may be
    lent to the next turn.
    """

    model: str
    prompt: str | list[Any] | msgspec.Raw = ""
    n: int = 1
    prompts: int = 1
    one_token: bool = False
    undivided: bool = False
    session: str | None = None
    cache_salt: bytes = b""
    ttft_s: float | None = None
    tpot_s: float | None = None
    max_tokens: int | None = None
    priority: int = 0
    key: bytes = b""
    is_kept: bool = True

    @cached_property
    def tokens(self) -> int:
        """The prompt's length in tokens: exact for token ids, else an estimate."""
        prompt = self._json
        if prompt.startswith(b'"'):
            return -(-(len(prompt) - 2) // BYTES_PER_TOKEN)
        if _is_of_ids(prompt):
            return prompt.count(b",") + 1
        return -(-len(_text(prompt)) // BYTES_PER_TOKEN)

    @property
    def tokens_per_prompt(self) -> int:
        """`tokens` of one of several prompts, on average."""
        return -(-self.tokens // self.prompts)

    @property
    def decoded_sequences(self) -> int:
        """Of how many sequences more than one token is wanted."""
        return 0 if self.one_token else self.n

    @cached_property
    def chunks(self) -> tuple[bytes, ...]:
        """A digest for each whole chunk of the prompt's beginning, of all that precedes it, model and salt.

        Two prompts share as many leading digests as they share whole chunks.
        """
        prompt = self._json
        is_ids = _is_of_ids(prompt)
        kind, chunks = ("ids", _chunks_of_ids(prompt)) if is_ids else ("text", _chunks_of_text(prompt))
        root = digest(Purpose.ROUTE_ROOT, self.model, self.cache_salt, kind, size=_DIGEST_BYTES)
        return tuple(chain(Purpose.ROUTE_CHUNK, root, chunks))

    @property
    def _json(self) -> bytes:
        """A copy, which may be large: not kept."""
        prompt = self.prompt
        return bytes(prompt) if isinstance(prompt, msgspec.Raw) else msgspec.json.encode(prompt)


def _is_of_ids(prompt: bytes) -> bool:
    """Return whether a prompt, as JSON, is of token ids."""
    return prompt.startswith(b"[") and not prompt.translate(None, _OF_TOKEN_IDS)


def _text(prompt: bytes) -> bytes:
    """Return texts as JSON spells them, and messages as they are."""
    if prompt.startswith(b'"'):
        return prompt[1:-1]
    if prompt[1:].lstrip().startswith(b'"'):
        return msgspec.json.encode("".join(_TEXTS.decode(prompt)))[1:-1]
    return prompt


def _chunks_of_text(prompt: bytes) -> Iterator[bytes]:
    size, text = CHUNK_TOKENS * BYTES_PER_TOKEN, _text(prompt)
    for start in range(0, min(len(text) - size + 1, size * MAX_CHUNKS), size):
        yield text[start : start + size]


def _chunks_of_ids(prompt: bytes) -> Iterator[bytes]:
    """Yield chunks of the beginning; there may be millions of ids."""
    most = MAX_CHUNKS * CHUNK_TOKENS
    ids = prompt.translate(None, _BRACKETS_AND_SPACE).split(b",", most)[:most]
    for start in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        yield b",".join(ids[start : start + CHUNK_TOKENS])


def routing_request(request: ClientRequest, session: str | None) -> RoutingRequest:
    """Return what routing needs of a client's request."""
    return RoutingRequest(
        model=request.model,
        prompt=request.prompt,
        n=request.sequences,
        prompts=request.prompts,
        one_token=request.max_tokens == 1,
        undivided=request.undivided,
        session=session,
        cache_salt=bytes(request.cache_salt),
        ttft_s=request.ttft_s,
        tpot_s=request.tpot_s,
        max_tokens=request.max_tokens,
        priority=request.priority,
        key=request.key,
        is_kept=request.cache_ttl_s != 0,
    )


class PinnedPair(NamedTuple):
    """Two agents that are to serve a request, whatever the policies say; one agent twice: it alone."""

    prefill: Incarnation
    decode: Incarnation


class PrefixLender(msgspec.Struct, frozen=True):
    """From whom a prefill agent may pull the beginning of a prompt, if it lacks at least so many tokens."""

    agent: Register
    min_tokens: int


class Pair(msgspec.Struct, frozen=True):
    """The agents of one attempt. `alone`: one agent serves the whole request, and no KV moves.

    `streamed`: the prompt is long enough for its KV to move while it is computed, and there is room for it.
    `prefix_lender`: an agent that may lend the prefill agent the KV of the prompt's beginning.
    """

    prefill: Node
    decode: Node
    streamed: bool = False
    prefix_lender: PrefixLender | None = None
    prediction: Prediction | None = None

    @property
    def alone(self) -> bool:
        return self.prefill.info.incarnation == self.decode.info.incarnation

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The agents of the pair, each once."""
        return (self.prefill,) if self.alone else (self.prefill, self.decode)
