# SPDX-License-Identifier: Apache-2.0
"""A command line, and a YAML file, for a settings dataclass: one flag per field, spelled with dashes.

What is wrong is said in one line that names the flag, the value and what would be right.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import docstring_parser
from jsonargparse import ArgumentError, ArgumentParser

from kvferry.common.exceptions import message_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

MAX_SHOWN_CHARS = 80
"""Of a value that is wrong."""
_DESCRIBED_TYPES = {int: "a whole number", float: "a number", bool: "true or false"}
# How jsonargparse says it.
_WRONG_VALUE = re.compile(
    r'Parser key "(\w+)":\s+(?:Expected|Does not validate).*(?:Got|Given) value: (.*)', re.DOTALL
)
_WRONG_FILE = re.compile(r'Parser key "(\w+)": (File does not exist|Path is not a file): .*', re.DOTALL)
_WRONG_KEY = re.compile(r"Option '([^']*)' is not accepted")
_NO_VALUE = re.compile(r"argument (--[\w-]+): expected (?:one|at least one) argument")
_MISSING = re.compile(r"the following arguments are required: (.*)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_WRONG_NUMBER = re.compile(r"argument ([^:]*): invalid (int|float) value: '(.*)'", re.DOTALL)
_WRONG_CHOICE = re.compile(r"argument ([^:]*): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


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
        SystemExit: with status 2 and a line on stderr that names the unknown flag or key, or the wrong
            value; with status 0 after `--help`.
    """
    parser = flag_parser(settings, prog=prog, description=description)
    types = get_type_hints(settings)
    unknown = _unknown_flag(argv, parser)
    if unknown is not None:
        exit_with(prog, f"{unknown}: no such option{did_you_mean(unknown, map(_flag, types))}")
    try:
        values = parser.parse_args(list(argv)).as_dict()
    except ArgumentError as error:
        exit_with(prog, _explained(str(error), types))
    values.pop("config")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        made = settings(**values)
        return made if check is None else check(made)
    except ValueError as error:
        exit_with(prog, _with_flags(str(error), types))


def exit_with(prog: str, message: str) -> NoReturn:
    """Print what is wrong with a command line, in one line, and exit with status 2."""
    print(f"{prog}: {' '.join(message.split())} (see {prog} --help)", file=sys.stderr)
    raise SystemExit(2)


class CommandParser(argparse.ArgumentParser):
    """The parser of a command without a settings class. Its errors are lines like those of `parse_flags`."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        exit_with(self.prog, _plain_explained(message, options))


def is_server_url(word: str) -> bool:
    """Whether this is http://HOST:PORT or https://…; a path may follow."""
    try:
        parts = urlsplit(word)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def server_url(word: str) -> str:
    """An argparse type: http://HOST:PORT or https://…, without a slash at its end."""
    if not is_server_url(word):
        raise argparse.ArgumentTypeError(
            f"{word[:MAX_SHOWN_CHARS]!r} is not http://HOST:PORT or https://HOST:PORT"
        )
    return word.rstrip("/")


def readable_file(word: str) -> Path:
    """An argparse type: a file that can be read."""
    if not os.access(word, os.R_OK):
        raise argparse.ArgumentTypeError(f"{word!r}: {_unreadable(word)}")
    return Path(word)


def read_key(path: Path) -> str:
    """Return the API key in a file. Raises OSError, and ValueError where the file holds anything else."""
    try:
        key = path.read_text().strip()
    except UnicodeDecodeError:
        key = ""
    if not (key and key.isascii() and key.isprintable()):
        raise ValueError(f"{str(path)!r} holds no key, which is one line of printable ASCII characters")
    return key


def key_in_file(word: str) -> str:
    """An argparse type: the API key in a file."""
    try:
        return read_key(readable_file(word))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(message_of(error)) from error


def check_files(settings: DataclassInstance, names: Iterable[str]) -> None:
    """Raise ValueError, naming the field, unless each file that is given can be read."""
    for name in names:
        path = getattr(settings, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"{name}: {str(path)!r}: {_unreadable(path)}")


def _unreadable(path: str | Path) -> str:
    return "no permission to read it" if os.path.exists(path) else "no such file"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` if one of the `known` words is like this one, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def flag_parser(settings: type[DataclassInstance], *, prog: str, description: str) -> ArgumentParser:
    """One flag per field. It may be repeated for `tuple[str, ...]`, and needs no value for a bool."""
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False, allow_abbrev=False)
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
        parser.add_argument(_flag(field.name), help=helps.get(field.name), **options)
    return parser


def take_option(words: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """Return the value that a command line gives an option, the last if there are several, or None; and the
    words without it. What follows `--` is for another program.
    """
    end = list(words).index("--") if "--" in words else len(words)
    value, rest, at = None, [], 0
    while at < end:
        name, equals, given = words[at].partition("=")
        if name == option and (equals or at + 1 < end):
            value = given if equals else words[at + 1]
            at += 1 if equals else 2
        else:
            rest.append(words[at])
            at += 1
    return value, [*rest, *words[end:]]


def flag_values(settings: type[DataclassInstance]) -> dict[str, tuple[str, ...]]:
    """Return each flag of a settings class, with the words that its value may be: none if any text."""
    types = get_type_hints(settings)
    return {
        _flag(field.name): ("true", "false")
        if types[field.name] is bool
        else tuple(map(str, _choices(types[field.name])))
        for field in fields(settings)
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unknown_flag(argv: Sequence[str], parser: ArgumentParser) -> str | None:
    known = {option for action in parser._actions for option in action.option_strings}
    given = (word.partition("=")[0] for word in argv if word.startswith("--") and word != "--")
    return next((flag for flag in given if flag not in known), None)


def _explained(message: str, types: Mapping[str, Any]) -> str:
    """Return jsonargparse's message in terms of flags and of what would be right."""
    if found := _WRONG_VALUE.fullmatch(message):
        name, value = found.groups()
        right = _described(types[name])
        close = did_you_mean(value, map(str, _choices(types[name])))
        return f"{_flag(name)}: {value[:MAX_SHOWN_CHARS]!r} is not {right}{close}"
    if found := _WRONG_FILE.fullmatch(message):
        return f"{_flag(found[1])}: {message.partition(': ')[2]}"
    if found := _WRONG_KEY.search(message):
        return f"--config: no such setting {found[1]!r}{did_you_mean(found[1], types)}"
    if found := _NO_VALUE.fullmatch(message):
        what = "a file" if found[1] == "--config" else _described(types.get(_name(found[1]), str))
        return f"{found[1]}: its value is missing, {what}"
    if found := _MISSING.fullmatch(message):
        return f"{_flag(found[1])} must be given"
    if found := _UNRECOGNIZED.fullmatch(message):
        return f"{found[1]!r}: every option begins with two dashes"
    if message.startswith(("Problems parsing config", "Unexpected config")):
        return f"--config: the file is not YAML with one setting a line: {message}"
    return message


def _plain_explained(message: str, options: Sequence[str]) -> str:
    """Return argparse's message as that of `_explained` would be."""
    if (found := _UNRECOGNIZED.fullmatch(message)) and found[1].startswith("--"):
        flag = found[1].split()[0].partition("=")[0]
        return f"{flag}: no such option{did_you_mean(flag, options)}"
    if found := _WRONG_NUMBER.fullmatch(message):
        what = _DESCRIBED_TYPES[{"int": int, "float": float}[found[2]]]
        return f"{found[1]}: {found[3][:MAX_SHOWN_CHARS]!r} is not {what}"
    if found := _WRONG_CHOICE.fullmatch(message):
        name, value, choices = found[1], found[2], found[3].replace("'", "")
        close = did_you_mean(value, choices.split(", "))
        return f"{name}: {value[:MAX_SHOWN_CHARS]!r} is not one of {choices}{close}"
    return message.removeprefix("argument ")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _choices(expected: Any) -> tuple[Any, ...]:
    """Return the words that a type allows, or none if it allows more than some words."""
    if get_origin(expected) is Literal:
        return get_args(expected)
    return tuple(choice for part in get_args(expected) for choice in _choices(part))


def _described(expected: Any) -> str:
    if choices := _choices(expected):
        return f"one of {', '.join(map(str, choices))}"
    parts = get_args(expected) or (expected,)
    return next((_DESCRIBED_TYPES[part] for part in parts if part in _DESCRIBED_TYPES), "a text")


def _with_flags(message: str, names: Iterable[str]) -> str:
    """Return a settings class's own message, in which its fields are called as on the command line."""
    for name in sorted(names, key=len, reverse=True):
        anywhere = "_" in name  # one that is no English word
        message = re.sub(rf"(?<![\w/.-]){name}(?![\w.])" if anywhere else rf"^{name}\b", _flag(name), message)
    return message
