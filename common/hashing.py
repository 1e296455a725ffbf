# SPDX-License-Identifier: Apache-2.0
"""The hash function of this project: BLAKE2b, with the purpose of each hash as its `person`.

What is hashed for one purpose never has the digest of what is hashed for another, nor of other fields for the
same one: fields are never joined, each is preceded by its length (docs/architecture.md#hashes).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator


@enum.unique
class Purpose(enum.Enum):
    """What a hash means: 16 bytes at most. Digests of different purposes are never compared."""

    # Prompts, and the KV of their beginnings.
    PREFIX_ROOT = b"kv prefix root"
    PREFIX_BLOCK = b"kv prefix block"
    PROMPT = b"prompt"
    VLLM_PROMPT = b"vllm prompt"
    SGLANG_PROMPT = b"sglang prompt"
    # Agents that can use each other's KV.
    LAYOUT = b"kv layout"
    WEIGHTS = b"weights"
    WEIGHT_FILE = b"weight file"
    DUMMY_WEIGHTS = b"dummy weights"
    DUMMY_TENSOR = b"dummy tensor"
    TOKENIZER = b"tokenizer"
    READING = b"reading of text"
    HOST = b"host"
    VLLM_WEIGHTS = b"vllm weights"
    VLLM_FILES = b"vllm files"
    VLLM_CONFIG = b"vllm config"
    VLLM_ADAPTER = b"vllm adapter"
    VLLM_TOKENIZER = b"vllm tokenizer"
    VLLM_LAYER = b"vllm layer"
    VLLM_LAYERS = b"vllm layers"
    SGLANG_WEIGHTS = b"sglang weights"
    SGLANG_FILES = b"sglang files"
    SGLANG_CONFIG = b"sglang config"
    SGLANG_TOKENIZER = b"sglang tokenize"
    SGLANG_LAYOUT = b"sglang layout"
    # Requests and answers.
    GRAMMAR = b"grammar"
    TOOL_CALL = b"tool call"
    # Routing.
    ROUTE_ROOT = b"route root"
    ROUTE_CHUNK = b"route chunk"
    SESSION = b"session"
    # Keys, and what is derived from them.
    API_KEY = b"api key"
    SALT_KEY = b"salt key"
    CACHE_SALT = b"cache salt"
    TRANSFER_TOKEN = b"transfer token"


def digest(purpose: Purpose, *fields: bytes | str, size: int, key: bytes = b"") -> bytes:
    """Hash the fields, in order, to `size` bytes. With a `key` (64 bytes at most) it is a MAC."""
    hasher = hashlib.blake2b(digest_size=size, key=key, person=purpose.value)
    for field in fields:
        raw = field.encode(errors="surrogatepass") if isinstance(field, str) else field
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return hasher.digest()


def chain(purpose: Purpose, root: bytes, links: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield a digest for each link, of it and of all before it, as long as `root`.

    `root` must be a digest of another purpose, of all else that the digests are to depend on.
    """
    parent, blank = root, hashlib.blake2b(digest_size=len(root), person=purpose.value)
    for link in links:
        hasher = blank.copy()
        hasher.update(parent)
        hasher.update(link)
        parent = hasher.digest()
        yield parent
