# SPDX-License-Identifier: Apache-2.0
"""Options of a backend, as in `--transfer-options BACKEND.NAME=VALUE,…`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


def parse_settings(backend: str, kind: type[S], options: Mapping[str, str]) -> S:
    """Convert text to a backend's settings. Raises ValueError that names the wrong option."""
    known = {field.name for field in dataclasses.fields(kind)}
    for name in options:
        if name not in known:
            raise ValueError(f"unknown option {backend}.{name}; known: {', '.join(sorted(known))}")
    try:
        settings: Any = msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"options of {backend}: {error}") from error
    return settings  # type: ignore[no-any-return]
