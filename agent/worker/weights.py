# SPDX-License-Identifier: Apache-2.0
"""Where a rank's weights come from: a checkpoint's safetensors, or a seeded random generator."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 1024
_DIGEST_BYTES = 8


class WeightSource(Protocol):
    """Reads parameters by name, only this rank's share of each."""

    def fingerprint(self) -> str:
        """Return 16 hex digits, equal for equal weights, however they are split."""
        ...

    def read(
        self, name: str, shape: tuple[int, ...], dimension: int | None, part: slice | None
    ) -> torch.Tensor:
        """Return the values of one parameter of full `shape`, or `part` of them along `dimension`.

        Raises:
            ValueError: there is no such parameter, or it has another shape.
        """
        ...


class CheckpointWeights:
    """A checkpoint directory with `model.safetensors`, or several files and their index."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            single = directory / "model.safetensors"
            if not single.is_file():
                raise ValueError(f"{directory} has neither model.safetensors nor an index of several files")
            with safe_open(single, framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), single.name)

    def fingerprint(self) -> str:
        """Hash every file's header and size, and 4 MiB sampled evenly from it: cheap for any size."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for name in sorted(set(self._file_of.values())):
            size = (self._directory / name).stat().st_size
            with open(self._directory / name, "rb") as file:
                header_len = int.from_bytes(file.read(8), "little")
                digest.update(size.to_bytes(8, "little") + file.read(header_len))
                body = 8 + header_len
                last = max(size - _SAMPLE_BYTES, body)
                for sample in range(_SAMPLES_PER_FILE):
                    file.seek(body + (last - body) * sample // (_SAMPLES_PER_FILE - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def read(
        self, name: str, shape: tuple[int, ...], dimension: int | None, part: slice | None
    ) -> torch.Tensor:
        if name not in self._file_of:
            raise ValueError(f"the checkpoint has no parameter {name}")
        with safe_open(self._directory / self._file_of[name], framework="pt") as file:
            values = file.get_slice(name)
            if tuple(values.get_shape()) != shape:
                raise ValueError(f"{name} has shape {values.get_shape()}, the model expects {list(shape)}")
            whole = [slice(None)] * len(shape)
            if dimension is not None and part is not None:
                whole[dimension] = part
            share: torch.Tensor = values[tuple(whole)]
            return share


class DummyWeights:
    """Random weights that depend on the config and the parameter's name alone, not on how they are split."""

    def __init__(self, config_json: str, spread: float, device: torch.device) -> None:
        self._config_json = config_json
        self._spread = spread
        self._device = device

    def fingerprint(self) -> str:
        """Generators differ by device type, hence so do the weights."""
        seed = f"dummy {self._device.type} {self._config_json}".encode()
        return hashlib.blake2b(seed, digest_size=_DIGEST_BYTES).hexdigest()

    def read(
        self, name: str, shape: tuple[int, ...], dimension: int | None, part: slice | None
    ) -> torch.Tensor:
        if len(shape) == 1 and name.endswith("weight"):
            values = torch.ones(shape, device=self._device)
        else:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
            generator = torch.Generator(self._device).manual_seed(seed)
            values = torch.randn(shape, generator=generator, device=self._device) * self._spread
        if dimension is not None and part is not None:
            values = values.narrow(dimension, part.start, part.stop - part.start).clone()
        return values
