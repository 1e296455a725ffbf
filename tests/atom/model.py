# SPDX-License-Identifier: Apache-2.0
"""The made-up model of the servers in `server.py`: its tokens are a function of what the KV is of.

So an answer from another prompt's KV, or from another rank's memory, is a wrong answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

EOS = 2
ENDS_AT_ONCE = "ends at once"
"""A prompt that contains this draws the end of sequence first."""
SLOW = "slow"
"""A prompt that contains this takes `SLOW_STEP_S` per token."""
SLOW_STEP_S = 0.2
MODEL = "atom-model"
_FIRST_WORD = 300


class Tokenizer:
    """One token per byte of a prompt; what the model draws are numbers."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte + 3 for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {each}" if each >= _FIRST_WORD else chr(each - 3) for each in ids if each != EOS)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        return chat_prompt(messages)


def chat_prompt(messages: Sequence[dict[str, Any]]) -> str:
    """The prompt that a chat is rendered to."""
    return "".join(f"[{each['role']}] {each['content']}\n" for each in messages)


def draw(kv: str, position: int) -> int:
    """The token at this position of an output, from the KV of this prompt."""
    if ENDS_AT_ONCE in kv and not position:
        return EOS
    return _FIRST_WORD + zlib.crc32(f"{kv}/{position}".encode()) % 1000


def answer(prompt: str, num_tokens: int) -> str:
    """The text of that many tokens."""
    return Tokenizer().decode([draw(prompt, position) for position in range(num_tokens)])
