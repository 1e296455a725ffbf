# SPDX-License-Identifier: Apache-2.0
"""Where a rank's weights come from, and the loader: transformers' own, which renames, merges and converts.

`load` takes the steps of transformers' `from_pretrained` after the model is made. That itself cannot put
weights on a device, or split them over ranks, without the accelerate package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from kvferry.agent.architectures import UnsupportedModel
from kvferry.agent.checkpoint import DIGEST_BYTES, BadCheckpoint, weight_files, weights_fingerprint
from kvferry.common.hashing import Purpose, digest

_MOST_NAMED = 3


class WeightSource(Protocol):
    """Tensors by name, each read only when it is indexed, and only as much of it."""

    def fingerprint(self) -> str:
        """Return 16 hex digits, equal for equal weights, however they are split."""
        ...

    def conversions(self, model: Any) -> list[Any]:
        """Return what transformers does to these tensors before they are the model's parameters."""
        ...

    @contextmanager
    def tensors(self, model: Any) -> Iterator[Mapping[str, Any]]:
        """Open the source: slices as safetensors has them, by name."""
        ...


class CheckpointWeights:
    """A checkpoint directory with `model.safetensors`, or several files and their index."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = weight_files(directory)

    def fingerprint(self) -> str:
        return weights_fingerprint(self._directory)

    def conversions(self, model: Any) -> list[Any]:
        return list(get_model_conversion_mapping(model, None, None))

    @contextmanager
    def tensors(self, model: Any) -> Iterator[Mapping[str, Any]]:
        with ExitStack() as files:
            found: dict[str, Any] = {}
            for path in self._files:
                file = files.enter_context(safe_open(path, framework="pt"))
                found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            yield found


class DummyWeights:
    """Random weights that depend on the config and the parameter's name alone, not on how they are split."""

    def __init__(self, config_json: str, spread: float, device: torch.device) -> None:
        self._config_json = config_json
        self._spread = spread
        self._device = device

    def fingerprint(self) -> str:
        """Generators differ by device type, hence so do the weights."""
        return digest(Purpose.DUMMY_WEIGHTS, self._device.type, self._config_json, size=DIGEST_BYTES).hex()

    def conversions(self, model: Any) -> list[Any]:
        return []

    @contextmanager
    def tensors(self, model: Any) -> Iterator[Mapping[str, Any]]:
        yield {
            name: DummyTensor(name, tuple(meta.shape), self._spread, self._device)
            for name, meta in model.state_dict().items()
            if name not in model.all_tied_weights_keys
        }


class DummyTensor:
    """One tensor of `DummyWeights`, made when it is indexed: what the loader uses of a safetensors slice."""

    def __init__(self, name: str, shape: tuple[int, ...], spread: float, device: torch.device) -> None:
        self._name = name
        self._shape = shape
        self._spread = spread
        self._device = device

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        if len(self._shape) == 1 and self._name.endswith("weight"):
            return torch.ones(self._shape, device=self._device)[index]
        seed = int.from_bytes(digest(Purpose.DUMMY_TENSOR, self._name, size=7), "little")
        generator = torch.Generator(self._device).manual_seed(seed)
        values = torch.randn(self._shape, generator=generator, device=self._device) * self._spread
        return values[index].clone()


def load(model: Any, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
    """Give a model on the meta device its weights; of a parameter that is a DTensor, this rank's share.

    Raises:
        UnsupportedModel: some tensor of the source was not read.
        BadCheckpoint: some parameter has no value, or one of another shape.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=source.conversions(model),
        ignore_mismatched_sizes=True,  # they are reported below, by name
    )
    with source.tensors(model) as tensors:
        found, _ = convert_and_load_state_dict_in_model(model, dict(tensors), settings)
    # It leaves out what the class says it may: buffers that are computed, heads that only train with it.
    model._finalize_model_loading(model, settings, found)
    problems = [f"cannot convert {name}" for name in found.conversion_errors] + list(found.error_msgs)
    problems += [
        f"{name} has shape {list(shape)}, the model expects {list(expected)}"
        for name, shape, expected in found.mismatched_keys
    ]
    problems += [f"the checkpoint has no parameter {name}" for name in found.missing_keys]
    problems += [f"the model has no parameter {name}" for name in found.unexpected_keys]
    if problems:
        named = "; ".join(sorted(problems)[:_MOST_NAMED])
        more = len(problems) - _MOST_NAMED
        # Without any that the model does not know, they are weights of this model, but not all, or others.
        knows_all = not (found.unexpected_keys or found.conversion_errors)
        raise (BadCheckpoint if knows_all else UnsupportedModel)(
            f"its weights do not fit config.json: {named}" + (f"; and {more} more" if more > 0 else "")
        )
