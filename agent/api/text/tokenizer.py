# SPDX-License-Identifier: Apache-2.0
"""The model's tokenizer as the API process needs it: text to ids, ids to bytes, and a fingerprint.

Loads `tokenizer.json` with the `tokenizers` package alone; importing transformers would cost 330 MB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from kvferry.agent.api.text.chat_template import ChatTemplate
from kvferry.agent.checkpoint import BadCheckpoint, read_json
from kvferry.common.hashing import Purpose, digest

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Three bytes of three letters each can become one syllable of three bytes (Hangul); Greek comes close.
_NFC_SHRINKS = 4
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TextTooLong(ValueError):
    """A text has more tokens than its caller takes; `num_tokens` says how many."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class Tokenizer:
    """One checkpoint's tokenizer. Immutable once loaded, and safe to use from any thread."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other class
            raise BadCheckpoint(f"{path} is no tokenizer: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self.fingerprint = _fingerprint(directory)
        self.vocab_size = _vocab_size(directory, self._fast)
        self.chat_template = _chat_template(directory)
        self.special_ids = frozenset(
            token_id for token_id, token in self._fast.get_added_tokens_decoder().items() if token.special
        )
        self.added_ids: Mapping[str, int] = {
            token.content: token_id for token_id, token in self._fast.get_added_tokens_decoder().items()
        }
        """Of the tokens that a text has as one, whatever is around them: special ones, and others."""
        spec = json.loads(self._fast.to_str())
        decoders = _decoder_types(spec["decoder"])
        self.byte_level = decoders == {"ByteLevel"}
        """Whether the text of ids is exactly the UTF-8 reading of their bytes, one after another."""
        self._byte_fallback = "ByteFallback" in decoders
        self.max_token_bytes = _max_token_bytes(spec, self._fast.get_vocab(), byte_level=self.byte_level)
        """How many bytes of text one token can stand for; None where a text may lose bytes on its way."""
        self.token_bytes = lru_cache(maxsize=self.vocab_size)(self._token_bytes)

    def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Return the ids of a text; with `add_special_tokens` after the tokenizer's own post-processor.

        Other threads run meanwhile. Raises `TextTooLong` beyond `max_tokens`.
        """
        # `encode` holds the interpreter's lock all the time, `encode_batch` releases it.
        (encoding,) = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TextTooLong(len(encoding))
        return tuple(encoding.ids)

    def decode(self, ids: list[int], show_special: bool = False) -> str:
        """Return the text of ids; what no valid UTF-8 spells is shown as U+FFFD."""
        return self._fast.decode(ids, skip_special_tokens=not show_special)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each word, and as vLLM does, those of the word after a space, if they are as many
        and begin otherwise.
        """
        encoded: list[tuple[int, ...]] = []
        for word in words:
            ids = self.encode(word.lstrip(), add_special_tokens=False)
            after_space = self.encode(f" {word.lstrip()}", add_special_tokens=False)
            encoded.append(ids)
            if len(after_space) == len(ids) and after_space[:1] != ids[:1]:
                encoded.append(after_space)
        return tuple(ids for ids in encoded if ids)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return [self._token(token_id) for token_id in ids]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, as logprobs show it."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def has_no_text(self, token_id: int, show_special: bool = False) -> bool:
        """Whether the token leaves no trace in text: special ones, and ids that only the model has."""
        return (token_id in self.special_ids and not show_special) or not self._token(token_id)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token stands for one raw byte (`<0xE2>`), whose reading depends on its neighbours."""
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(self._token(token_id)) is not None

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token_id in self.special_ids:
            return token.encode()
        if self.byte_level:
            # As the ByteLevel decoder: a token with any character outside the alphabet stands for itself.
            spelled = [_BYTE_OF_CHAR.get(char) for char in token]
            return (
                bytes(byte for byte in spelled if byte is not None) if None not in spelled else token.encode()
            )
        if self.is_byte_token(token_id):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def _token(self, token_id: int) -> str:
        # A model's vocabulary may be padded beyond the tokenizer's.
        return self._fast.id_to_token(token_id) or ""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's reversible map: printable Latin-1 bytes stand for themselves, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + rank): byte for rank, byte in enumerate(other)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _decoder_types(spec: dict[str, Any] | None) -> set[str]:
    if spec is None:
        return set()
    if spec["type"] == "Sequence":
        return set().union(*(_decoder_types(part) for part in spec["decoders"]))
    return {spec["type"]}


def _max_token_bytes(spec: dict[str, Any], vocabulary: Iterable[str], *, byte_level: bool) -> int | None:
    """Return the length of the longest token's text, if every byte of a text ends up in some token."""
    model, vocabulary = spec["model"], frozenset(vocabulary)
    whole = byte_level and vocabulary.issuperset(_BYTE_OF_CHAR)
    if model["type"] != "BPE" or not (whole or model.get("byte_fallback")):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"]):
        return None  # they swallow the spaces beside them
    steps = [*_steps(spec["normalizer"], "normalizers"), *_steps(spec["pre_tokenizer"], "pretokenizers")]
    if not all(_keeps_text(step) for step in steps):
        return None
    added = {token["content"] for token in spec["added_tokens"]}
    spelled = {token for token in vocabulary if byte_level and token not in added}
    longest = max(len(token) if token in spelled else len(token.encode()) for token in vocabulary)
    return longest * (_NFC_SHRINKS if any(step["type"] == "NFC" for step in steps) else 1)


def _steps(spec: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [step for part in spec[parts] for step in _steps(part, parts)]
    return [spec]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer drops nothing (NFC composes, by a known factor)."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(step["content"].encode())
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("NFC", "Prepend", "ByteLevel", "Digits", "Metaspace")


def _fingerprint(directory: Path) -> str:
    files = (directory / name for name in _FILES)
    fields = (field for path in files if path.exists() for field in (path.name, path.read_bytes()))
    return digest(Purpose.TOKENIZER, *fields, size=8).hex()


def _vocab_size(directory: Path, fast: FastTokenizer) -> int:
    # The model's own count bounds the ids that it can embed; the tokenizer may know fewer or more.
    config = read_json(directory / "config.json")
    return int(config.get("vocab_size") or fast.get_vocab_size())


def _chat_template(directory: Path) -> ChatTemplate | None:
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    file = directory / "chat_template.jinja"
    source: Any = file.read_text() if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not source:
        return None
    named = {role: config[role] for role in _SPECIAL_ROLES if config.get(role) is not None}
    tokens = {role: each["content"] if isinstance(each, dict) else each for role, each in named.items()}
    return ChatTemplate(source, tokens)
