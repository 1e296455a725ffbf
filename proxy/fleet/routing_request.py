# SPDX-License-Identifier: Apache-2.0
"""What routing knows of a request. There is no tokenizer here: lengths of text are estimates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import msgspec

from kvferry.proxy.request import ClientRequest

BYTES_PER_TOKEN = 4
"""Of ordinary text under a large vocabulary; other text is misjudged by a small factor."""
CHUNK_TOKENS = 64
MAX_CHUNKS = 512
_DIGEST_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class RoutingRequest:
    """What policies choose by.

    `prompt` is the client's own: text, token ids, a list of either, or a chat's messages. It is read only for
    `tokens` and `chunks`. `n`: how many sequences it makes. `one_token`: one token of each is enough.
    `undivided`: one agent should serve all of it. `session`: the client's session id.
    """

    model: str
    prompt: str | list[Any] = ""
    n: int = 1
    one_token: bool = False
    undivided: bool = False
    session: str | None = None

    @cached_property
    def tokens(self) -> int:
        """The prompt's length in tokens: exact for token ids, else an estimate."""
        material = self._material
        return len(material) if isinstance(material, list) else -(-len(material) // BYTES_PER_TOKEN)

    @cached_property
    def chunks(self) -> tuple[bytes, ...]:
        """A digest for each whole chunk of the prompt's beginning, of all that precedes it, and of the model.

        Two prompts share as many leading digests as they share whole chunks.
        """
        digest = self.model.encode(errors="surrogatepass")
        digests = []
        for chunk in self._cut():
            digest = hashlib.blake2b(digest + chunk, digest_size=_DIGEST_BYTES).digest()
            digests.append(digest)
        return tuple(digests)

    def _cut(self) -> Iterator[bytes]:
        material = self._material
        size = CHUNK_TOKENS if isinstance(material, list) else CHUNK_TOKENS * BYTES_PER_TOKEN
        for start in range(0, min(len(material) - size + 1, size * MAX_CHUNKS), size):
            chunk = material[start : start + size]
            yield chunk if isinstance(chunk, bytes) else repr(chunk).encode()

    @cached_property
    def _material(self) -> bytes | list[int]:
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            prompt = "".join(prompt)
        elif isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
            prompt = list(chain.from_iterable(prompt))
        if isinstance(prompt, str):
            return prompt.encode(errors="surrogatepass")
        if prompt and isinstance(prompt[0], dict):
            return msgspec.json.encode(prompt)
        return prompt


def routing_request(request: ClientRequest, session: str | None) -> RoutingRequest:
    """Return what routing needs of a client's request."""
    return RoutingRequest(
        model=request.model,
        prompt=request.prompt,
        n=request.sequences,
        one_token=request.max_tokens == 1,
        undivided=request.undivided,
        session=session,
    )
