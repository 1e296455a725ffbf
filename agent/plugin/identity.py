# SPDX-License-Identifier: Apache-2.0
"""Digests of a model's files, config and tokenizer, as engines name them. 16 hex digits each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvferry.agent.checkpoint import weights_fingerprint
from kvferry.common.hashing import Purpose, digest

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_DIGEST_BYTES = 8
_UNNAMED = ("_name_or_path", "transformers_version", "_commit_hash")
"""Fields of a model's config that do not change what it computes."""


def tokenizer_digest(tokenizer: str, revision: str | None, purpose: Purpose) -> str:
    """Equal for equal tokenizers of a local directory; else of its name and revision."""
    directory = Path(tokenizer)
    if not directory.is_dir():
        return short_digest(purpose, "by name", tokenizer, str(revision))
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    fields = (field for path in files for field in (path.name, path.read_bytes()))
    return short_digest(purpose, "files", *fields)


def files_digest(directory: Path, purpose: Purpose) -> str:
    """Equal for equal weights. `purpose`: of files in a format that is read by other loaders, by size."""
    try:
        return weights_fingerprint(directory)
    except ValueError:
        return short_digest(purpose, *_sizes(directory))


def config_digest(config: Any, purpose: Purpose) -> str:
    """Of the model's own config: rope, windows, sizes and all else that its KV depends on.

    `config` is a `transformers.PretrainedConfig`.
    """
    fields = config.to_dict()
    kept = {name: value for name, value in fields.items() if name not in _UNNAMED}
    return short_digest(purpose, json.dumps(kept, sort_keys=True, default=str))


def short_digest(purpose: Purpose, *fields: bytes | str) -> str:
    return digest(purpose, *fields, size=_DIGEST_BYTES).hex()


def _sizes(directory: Path) -> list[str]:
    sizes = sorted((path.name, str(path.stat().st_size)) for path in directory.iterdir() if path.is_file())
    return [field for each in sizes for field in each]
