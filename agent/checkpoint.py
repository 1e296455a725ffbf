# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory's files of weights, and what identifies them."""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.common.hashing import Purpose, digest

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 1024
DIGEST_BYTES = 8


def weight_files(directory: Path) -> list[Path]:
    """`model.safetensors`, or several files as their index names them. Raises ValueError for neither."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
    elif (directory / "model.safetensors").is_file():
        named = {"model.safetensors"}
    else:
        raise ValueError(f"{directory} has neither model.safetensors nor an index of several files")
    return [directory / name for name in sorted(named)]


def weights_fingerprint(directory: Path) -> str:
    """16 hex digits over every file's header and size, and 4 MiB sampled evenly from it: cheap for any size.

    Raises ValueError if the directory holds no weights.
    """
    files = (_file_digest(path) for path in weight_files(directory))
    return digest(Purpose.WEIGHTS, *files, size=DIGEST_BYTES).hex()


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    with open(path, "rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        fields: list[bytes | str] = [str(size), file.read(header_len)]
        body = 8 + header_len
        last = max(size - _SAMPLE_BYTES, body)
        for sample in range(_SAMPLES_PER_FILE):
            file.seek(body + (last - body) * sample // (_SAMPLES_PER_FILE - 1))
            fields.append(file.read(_SAMPLE_BYTES))
    return digest(Purpose.WEIGHT_FILE, *fields, size=2 * DIGEST_BYTES)
