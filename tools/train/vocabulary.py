# SPDX-License-Identifier: Apache-2.0
"""The fixed vocabulary of ferry-tiny, and the tokenizer files that spell it out.

    id 0..255      one byte each, so that every UTF-8 text survives encoding and decoding
    id 256..931    the 676 pairs of lowercase letters, so that the key of a recall task is one token
    id 932..935    special tokens

Digits stay single tokens: addition is learnt digit by digit.
"""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

KEYS = tuple(first + second for first in ascii_lowercase for second in ascii_lowercase)
FIRST_KEY = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, USER, ASSISTANT, END = range(FIRST_KEY + len(KEYS), FIRST_KEY + len(KEYS) + len(SPECIAL_TOKENS))
SIZE = END + 1

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def byte_spellings() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, indexed by the byte.

    The table is GPT-2's `bytes_to_unicode`: visible Latin-1 characters stand for themselves, the others are
    moved to code points from 256 upwards in ascending order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in visible else next(moved)) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """The byte-level BPE tokenizer whose only merges make the keys.

    Runs of lowercase letters are cut into pairs from the left before merging, so a key at the start of a run
    is the same token whatever stands around it.
    """
    vocab = {spelling: byte for byte, spelling in enumerate(byte_spellings())}
    vocab |= {key: FIRST_KEY + index for index, key in enumerate(KEYS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(key[0], key[1]) for key in KEYS]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[a-z]{2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `directory`."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "pad_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[3],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
