# SPDX-License-Identifier: Apache-2.0
"""A command line, and a YAML file, for a settings dataclass: one flag per field, spelled with dashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def parse_flags(
    settings: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    check: Callable[[C], C] | None = None,
) -> C:
    """Read `argv` into a frozen dataclass, whose docstring describes its fields.

    `check` returns the settings, perhaps completed; it raises `ValueError` for a wrong value, as the
    dataclass itself may.

    Raises:
        SystemExit: with status 2 and a message that names the unknown flag or key, or the wrong value;
            with status 0 after `--help`.
    """
    parser = flag_parser(settings, prog=prog, description=description)
    values = parser.parse_args(list(argv)).as_dict()
    values.pop("config")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        made = settings(**values)
        return made if check is None else check(made)
    except ValueError as error:
        parser.error(str(error))


def flag_parser(settings: type[DataclassInstance], *, prog: str, description: str) -> ArgumentParser:
    """One flag per field. It may be repeated for `tuple[str, ...]`, and needs no value for a bool."""
    parser = ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below.")
    types = get_type_hints(settings)
    described = docstring_parser.parse(settings.__doc__ or "").params
    helps = {param.arg_name: param.description for param in described}
    for field in fields(settings):
        options: dict[str, Any] = {"type": types[field.name], "default": field.default}
        if types[field.name] == tuple[str, ...]:
            options = {"nargs": "+", "action": "extend", "type": str, "default": []}
        elif field.default is MISSING:
            options = {"type": types[field.name], "required": True}
        elif field.default is False:
            options |= {"nargs": "?", "const": True}
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=helps.get(field.name), **options)
    return parser
