# SPDX-License-Identifier: Apache-2.0
"""A command line, and a YAML file, for a settings dataclass: one flag per field, spelled with dashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def parse_flags(settings: type[C], argv: Sequence[str], *, prog: str, description: str) -> C:
    """Read a frozen dataclass whose fields all have defaults and whose docstring describes them.

    A field of type `tuple[str, ...]` becomes a flag that may be repeated.

    Raises:
        SystemExit: with status 2 and a message that names the unknown flag or key, or the wrong value;
            with status 0 after `--help`.
    """
    parser = ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below.")
    types = get_type_hints(settings)
    described = docstring_parser.parse(settings.__doc__ or "").params
    helps = {param.arg_name: param.description for param in described}
    for field in fields(settings):
        flag, explained = f"--{field.name.replace('_', '-')}", helps.get(field.name)
        if types[field.name] == tuple[str, ...]:
            parser.add_argument(flag, nargs="+", action="extend", type=str, default=[], help=explained)
        else:
            parser.add_argument(flag, type=types[field.name], default=field.default, help=explained)
    values = parser.parse_args(list(argv)).as_dict()
    values.pop("config")
    # A list of words is how a flag may be repeated; settings do not change.
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return settings(**values)
    except ValueError as error:
        parser.error(str(error))
