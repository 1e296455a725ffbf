# SPDX-License-Identifier: Apache-2.0
"""The options of a command: the fields of a settings dataclass, read from words, a YAML file or JSON.

A field `drain_s` is `--drain-s` on a command line, and `drain-s` (or `drain_s`) in a file. Its docstring
describes the fields in groups, as `--help` shows them:

    Network:
        host: Address that the HTTP server binds.

What is wrong is said in one line that names the option, the value and what would be right.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec

from kvferry.common.addresses import check_dialable
from kvferry.common.exceptions import NOT_JSON, message_of
from kvferry.common.yaml_file import MAX_FILE_BYTES, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
N = TypeVar("N", int, float)
Source = Sequence[str] | Mapping[str, Any]
"""Words of a command line, or data: a mapping from options to values."""

GROUPS = (
    *("Model", "Engine", "Load", "Processes", "Network", "Routing", "Canary", "KV transfer"),
    *("Timeouts", "Limits", "Security", "Metrics", "Logs", "Results"),
)
"""The groups of options, in the order of `--help`."""
GENERAL = "General"
HELP = "Show this help message."
MAX_SHOWN_CHARS = 80
"""How much of a wrong value is shown."""
_DESCRIBED_TYPES = {int: "a whole number", float: "a number", bool: "true or false"}
_METAVARS = {int: "N", float: "NUMBER", bool: "true|false", Path: "FILE"}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a settings class. `choices`: the words that its value may be; none if any."""

    field: str
    kind: Any
    default: Any
    group: str
    help: str

    @property
    def name(self) -> str:
        """As files spell it."""
        return self.field.replace("_", "-")

    @property
    def is_list(self) -> bool:
        return bool(self.kind == tuple[str, ...])

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(map(str, _choices(self.kind)))

    @property
    def expected(self) -> str:
        """What would be right, in words."""
        type_ = next((_DESCRIBED_TYPES[part] for part in self._parts if part in _DESCRIBED_TYPES), None)
        if self.choices:
            return f"{type_} or {self.choices[0]}" if type_ else f"one of {', '.join(self.choices)}"
        return type_ or "a text"

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`."""
        types = [_METAVARS[part] for part in self._parts if part in _METAVARS]
        return "|".join((*self.choices, *types)) or "TEXT"

    @property
    def _parts(self) -> tuple[Any, ...]:
        return get_args(self.kind) or (self.kind,)

    def convert(self, value: Any) -> Any:
        """Return a value in the field's type. Raises ValueError that says what would be right."""
        try:
            if Path not in self._parts:
                return msgspec.convert(value, self.kind, strict=False)
            name = msgspec.convert(value, str | None if type(None) in self._parts else str)
            return None if name is None else Path(name)
        except (msgspec.ValidationError, OverflowError) as error:
            word = value if isinstance(value, str) else ""
            shown = repr(value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value)[: MAX_SHOWN_CHARS + 2]
            raise ValueError(f"{shown} is not {self.expected}{did_you_mean(word, self.choices)}") from error


def options_of(settings: type[DataclassInstance]) -> dict[str, Option]:
    """Return the options of a settings class, by its fields, in the order of `--help`.

    Raises KeyError for a field that no docstring describes, and ValueError for a group that is none.
    """
    types, described = get_type_hints(settings), _described_fields(settings)
    several = [field.name for field in fields(settings) if "_" in field.name]  # no English words
    options = []
    for field in fields(settings):
        group, words = described[field.name]
        words = _with_flags(words, several)
        options.append(Option(field.name, types[field.name], field.default, group, words))
    groups, places = list(GROUPS), list(described)
    options.sort(key=lambda each: (groups.index(each.group), places.index(each.field)))
    return {each.field: each for each in options}


def parse_flags(
    settings: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    arguments: str = "",
    check: Callable[[C], C] | None = None,
) -> C:
    """Read `argv` into a frozen dataclass, whose docstring describes its fields.

    `arguments` stands for words before the options, in the usage line of `--help`. `check` returns the
    settings, perhaps completed; it raises `ValueError` for a wrong value, as the
    dataclass itself may.

    Raises:
        SystemExit: with status 2 and a line on stderr that names the unknown option, or the wrong value; with
            status 0 after `--help`.
    """
    values = collect(settings, [argv], prog=prog, description=description, arguments=arguments)
    return make(settings, values, prog=prog, check=check)


def collect(
    settings: type[DataclassInstance],
    sources: Iterable[Source],
    *,
    prog: str,
    description: str = "",
    arguments: str = "",
    part: str = "",
) -> dict[str, Any]:
    """Return the values that sources give to fields; a later one wins, and adds to a list.

    `part` is the part of a fleet that the options are for: `--agent.lease-s`.

    Raises:
        SystemExit: as `parse_flags` does.
    """
    parser = flag_parser(settings, prog=prog, description=description, arguments=arguments)
    reader = _Reader(settings, prog, parser, part)
    for source in sources:
        if isinstance(source, Mapping):
            reader.take_data(source)
        else:
            reader.take_words(source)
    return reader.values


def make(
    settings: type[C], values: Mapping[str, Any], *, prog: str, check: Callable[[C], C] | None = None
) -> C:
    """Return the settings with these values. Raises SystemExit as `parse_flags` does."""
    options = options_of(settings)
    for option in options.values():
        if option.default is MISSING and option.field not in values:
            exit_with(prog, f"--{option.name} must be given")
    try:
        made = settings(**values)
        return made if check is None else check(made)
    except ValueError as error:
        exit_with(prog, _with_flags(str(error), options))


class _Reader:
    def __init__(
        self, settings: type[DataclassInstance], prog: str, parser: argparse.ArgumentParser, part: str
    ) -> None:
        self._options = options_of(settings)
        self._prog = prog
        self._parser = parser
        self._prefix = f"{part}." if part else ""
        self.values: dict[str, Any] = {}

    def take_words(self, argv: Sequence[str]) -> None:
        known = {option for action in self._parser._actions for option in action.option_strings}
        names = (word.partition("=")[0] for word in argv if word.startswith("--") and word != "--")
        for name in names:
            if name not in known:
                close = did_you_mean(name, known)
                exit_with(self._prog, self._flagged(f"{name}: no such option{close}"))
        try:
            namespace, rest = self._parser.parse_known_args(list(argv), argparse.Namespace(given=[]))
        except argparse.ArgumentError as error:
            self._exit_without_value(error)
        if rest:
            exit_with(self._prog, f"{' '.join(rest)!r}: every option begins with two dashes")
        for field, words in namespace.given:
            if field == "config":
                self.take_data(read_settings(words, self._prog))
            else:
                self._put(self._options[field], words)

    def take_data(self, data: Mapping[str, Any]) -> None:
        for name, value in data.items():
            option = self._options.get(str(name).replace("-", "_"))
            if option is None:
                names = [each.name for each in self._options.values()]
                close = did_you_mean(str(name).replace("_", "-"), names)
                exit_with(self._prog, f"--config: no such setting '{self._prefix}{name}'{close}")
            self._put(option, [value] if option.is_list and isinstance(value, str) else value)

    def _exit_without_value(self, error: argparse.ArgumentError) -> NoReturn:
        """Name the option that has none: nothing else can be wrong, as every word is a value here."""
        flag = error.argument_name or ""
        option = self._options.get(flag.removeprefix("--").replace("-", "_"))
        if option is None and flag != "--config":
            exit_with(self._prog, f"{flag} takes no value")
        what = "a file" if option is None else option.expected
        exit_with(self._prog, self._flagged(f"{flag}: its value is missing, {what}"))

    def _put(self, option: Option, value: Any) -> None:
        try:
            converted = option.convert(value)
        except ValueError as error:
            exit_with(self._prog, self._flagged(f"--{option.name}: {error}"))
        if option.is_list:
            converted = (*self.values.get(option.field, ()), *converted)
        self.values[option.field] = converted

    def _flagged(self, message: str) -> str:
        return message.replace("--", f"--{self._prefix}") if self._prefix else message


class _Record(argparse.Action):
    """Notes what was given, in the order of the command line."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None
    ) -> None:
        namespace.given.append((self.dest, values))


def flag_parser(
    settings: type[DataclassInstance], *, prog: str, description: str, arguments: str = ""
) -> argparse.ArgumentParser:
    """One flag per field. It may be repeated for `tuple[str, ...]`, and needs no value for a bool."""
    parser = argparse.ArgumentParser(
        prog=prog, usage=" ".join((*filter(None, (prog, arguments)), "[OPTIONS]")), description=description,
        allow_abbrev=False, exit_on_error=False, add_help=False,
    )  # fmt: skip
    general = parser.add_argument_group(GENERAL)
    general.add_argument("-h", "--help", action="help", help=HELP)
    general.add_argument(
        "--config", action=_Record, default=argparse.SUPPRESS, metavar="FILE",
        help="YAML file with any of these options, by the same names. - reads JSON from standard input.",
    )  # fmt: skip
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options_of(settings).values():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        groups[option.group].add_argument(
            f"--{option.name}", dest=option.field, action=_Record, default=argparse.SUPPRESS,
            nargs="+" if option.is_list else "?" if option.kind is bool else None, const="true",
            metavar=option.metavar, help=_help(option),
        )  # fmt: skip
    return parser


def _help(option: Option) -> str:
    shown = option.default
    if shown is MISSING or shown is None or shown is False or shown in ("", (), sys.executable):
        return option.help.replace("%", "%%")
    return f"{option.help} (default: {shown})".replace("%", "%%")


def read_settings(name: str, prog: str) -> Mapping[str, Any]:
    """Return the settings in a YAML file, or of `-` those that standard input holds as JSON.

    Raises SystemExit with status 2 and a line on stderr.
    """
    try:
        data = (
            msgspec.json.decode(sys.stdin.buffer.read(MAX_FILE_BYTES))
            if name == "-"
            else read_yaml(Path(name))
        )
    except OSError as error:
        exit_with(prog, f"--config: {name!r}: {error.strerror}")
    except (ValueError, *NOT_JSON) as error:
        exit_with(prog, f"--config: {error}")
    if not isinstance(data, Mapping):
        exit_with(prog, f"--config: {name!r} holds no settings, one a line as `port: 8000`")
    return data


def as_json(values: Mapping[str, Any]) -> bytes:
    """Return values of fields as `--config -` reads them."""
    return msgspec.json.encode(values, enc_hook=str)


def exit_with(prog: str, message: str) -> NoReturn:
    """Print what is wrong with a command line, in one line, and exit with status 2."""
    print(f"{prog}: {' '.join(message.split())} (see {prog} --help)", file=sys.stderr)
    raise SystemExit(2)


class CommandParser(argparse.ArgumentParser):
    """The parser of a command without a settings class. Its errors are lines like those of `parse_flags`."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self._positionals.title, self._optionals.title = "Arguments", GENERAL
        self.add_argument("-h", "--help", action="help", help=HELP)

    def format_help(self) -> str:
        """As that of the commands with a settings class: without the options in the usage line."""
        words = (action for action in self._actions if not action.option_strings)
        shown = (str(word.metavar) if word.required else f"[{word.metavar}]" for word in words)
        self.usage = " ".join((self.prog, *shown, "[OPTIONS]"))
        return super().format_help()

    def add_choice(self, name: str, choices: Sequence[str], **options: Any) -> None:
        """Add an argument that is one of some words."""

        def chosen(word: str) -> str:
            if word not in choices:
                raise argparse.ArgumentTypeError(
                    f"{word[:MAX_SHOWN_CHARS]!r} is not one of {', '.join(choices)}"
                    f"{did_you_mean(word, choices)}"
                )
            return word

        shown = "|".join(choices) if name.startswith("-") else name.upper()
        self.add_argument(name, type=chosen, choices=choices, metavar=shown, **options)

    def add_credentials(self, signed: str) -> None:
        """Add `--key` and `--ca`, for a secured server. `signed` names in the help what was signed."""
        self.add_argument(
            "--key",
            type=key_in_file,
            metavar="FILE",
            help="File that holds the operator's key, if the proxy has one.",
        )
        self.add_argument(
            "--ca",
            type=readable_file,
            metavar="FILE",
            help=f"PEM file of the authority that signed {signed}.",
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Read a command line, in which arguments may follow options. Raises SystemExit with status 2."""
        found, rest = self.parse_known_intermixed_args(list(argv))
        if rest:
            flag = next((word.partition("=")[0] for word in rest if word.startswith("--")), None)
            if flag is None:
                exit_with(self.prog, f"unrecognized arguments: {' '.join(rest)}")
            known = [option for action in self._actions for option in action.option_strings]
            exit_with(self.prog, f"{flag}: no such option{did_you_mean(flag, known)}")
        return found

    def error(self, message: str) -> NoReturn:
        exit_with(self.prog, message.removeprefix("argument "))


def number(word: str) -> float:
    """An argparse type: a number."""
    return _number(word, float)


def whole_number(word: str) -> int:
    """An argparse type: a whole number."""
    return _number(word, int)


def _number(word: str, kind: type[N]) -> N:
    try:
        return kind(word)
    except ValueError:
        shown = word[:MAX_SHOWN_CHARS]
        raise argparse.ArgumentTypeError(f"{shown!r} is not {_DESCRIBED_TYPES[kind]}") from None


def is_server_url(word: str) -> bool:
    """Whether this is http://HOST:PORT or https://…; a path may follow."""
    try:
        parts = urlsplit(word)
        check_dialable(parts.hostname or "")
        return parts.scheme in ("http", "https") and parts.port != 0
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
    return {
        f"--{option.name}": ("true", "false") if option.kind is bool else option.choices
        for option in options_of(settings).values()
    }


def _described_fields(settings: type[DataclassInstance]) -> dict[str, tuple[str, str]]:
    """Return the group and the description of each field, by the docstrings of the class and its bases."""
    found: dict[str, tuple[str, str]] = {}
    for each in settings.__mro__:
        group = name = ""
        theirs: dict[str, tuple[str, str]] = {}
        for line in inspect.cleandoc(each.__doc__ or "").splitlines():
            text = line.strip()
            indent = len(line) - len(text)
            if indent == 0 and text:
                group, name = text.removesuffix(":") if text.endswith(":") else "", ""
            elif indent == 4 and group:
                name, _, words = text.partition(": ")
                theirs[name] = group, words
            elif text and name:
                theirs[name] = group, f"{theirs[name][1]} {text}"
        found = found | {name: words for name, words in theirs.items() if name not in found}
    return found


def _choices(expected: Any) -> tuple[Any, ...]:
    """Return the words that a type allows, or none if it allows more than some words."""
    if get_origin(expected) is Literal:
        return get_args(expected)
    return tuple(choice for part in get_args(expected) for choice in _choices(part))


def _with_flags(message: str, names: Iterable[str]) -> str:
    """Return a settings class's own message, in which its fields are called as on the command line."""
    for name in sorted(names, key=len, reverse=True):
        anywhere = "_" in name  # one that is no English word
        pattern = rf"(?<![\w/.-]){name}(?!\w|\.\w)" if anywhere else rf"^{name}\b"
        message = re.sub(pattern, f"--{name.replace('_', '-')}", message)
    return message
