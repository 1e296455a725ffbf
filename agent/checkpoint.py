# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory's files: read, checked before a model is loaded, and identified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvferry.common.exceptions import NOT_JSON, message_of
from kvferry.common.hashing import Purpose, digest

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 1024
DIGEST_BYTES = 8
_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""As safetensors has it."""


class _HeaderEntry(msgspec.Struct):
    """A tensor in a safetensors header, or its metadata, which has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


class BadCheckpoint(ValueError):
    """A file of the checkpoint is missing, cut off, or not what its name says; the message names it."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises `BadCheckpoint`."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(message_of(error)) from error
    except (ValueError, RecursionError) as error:
        what = f"is not JSON: {error}" if path.stat().st_size else "is empty"
        raise BadCheckpoint(f"{path} {what}") from error
    if not isinstance(data, dict):
        raise BadCheckpoint(f"{path} must hold an object")
    return data


def weight_files(directory: Path) -> list[Path]:
    """`model.safetensors`, or several files as their index names them. Raises `BadCheckpoint` for neither."""
    index = directory / _INDEX
    if index.is_file():
        named = read_json(index).get("weight_map")
        if not (isinstance(named, dict) and named and all(isinstance(each, str) for each in named.values())):
            raise BadCheckpoint(f"{index} names no files")
        return [directory / name for name in sorted(set(named.values()))]
    if not (directory / "model.safetensors").is_file():
        raise BadCheckpoint(f"{directory} has neither model.safetensors nor {_INDEX}")
    return [directory / "model.safetensors"]


def check_weights(directory: Path) -> None:
    """Raise `BadCheckpoint` unless every file of weights is there and as long as its header says."""
    for path in weight_files(directory):
        try:
            defect = _defect(path)
        except FileNotFoundError:
            defect = f"it is missing, and {_INDEX} names it"
        except OSError as error:
            raise BadCheckpoint(message_of(error)) from error
        if defect is not None:
            raise BadCheckpoint(f"{path}: {defect}; download the model again")


def _defect(path: Path) -> str | None:
    size = path.stat().st_size
    if size == 0:
        return "it is empty"
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = file.read(min(header_len, _MAX_HEADER_BYTES))
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _HeaderEntry])
    except NOT_JSON:
        return "it is cut off, or no safetensors file"
    ends = (each.data_offsets[1] for each in tensors.values())
    expected = _LENGTH_BYTES + header_len + max(ends, default=0)
    return None if size == expected else f"it has {size} bytes, and its header says {expected}"


def weights_fingerprint(directory: Path) -> str:
    """16 hex digits over every file's header and size, and 4 MiB sampled evenly from it: cheap for any size.

    Raises `BadCheckpoint` if the directory holds no weights.
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
