# SPDX-License-Identifier: Apache-2.0
"""Prose uses the field's words, and each word has one meaning.

`python -m tests.unit.test_words [PATH…]` lists what is against that, with file and line.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = [
    *("agent", "common", "deploy", "proxy", "transfer", "tools", "docs"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "tests/README.md", "benchmarks/README.md"),
]
SUFFIXES = {".py", ".md", ".html", ".css", ".js", ".yml", ".json", ""}
GENERATED = ("deploy/models/",)

# Only a few: a ban is no help to write plainly, so a reader goes over prose too (CONTRIBUTING.md).
PROSE = re.compile(
    r"\b(nobody|somebody|whoever|in vain|for ever|of ours|knock(s|ed)?|comes? to nothing|its log says why)\b",
    re.IGNORECASE,
)
# Since Python 3.12 the text of an f-string is a token of its own.
PROSE_TOKENS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
# Each has one meaning, so one definition: of a class or a function, private ones included.
ONE_MEANING = {"leg", "link", "take", "answer", "reply", "choice", "usage", "first_token", "peer"}


# Classes of one meaning that the import rule keeps apart: the proxy imports neither `agent` nor `transfer`.
SAME_MEANING = {"StreamOptions"}


def files(paths: list[str]) -> Iterator[Path]:
    for name in paths:
        found = [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*"))
        for path in found:
            where = path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix in SUFFIXES and not where.startswith(GENERATED):
                yield path


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and word of what `PROSE` matches."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in PROSE.finditer(line):
            yield number, match[0]


def wrong_words(path: Path) -> list[str]:
    """Return what `PROSE` matches in a file, in Python only comments and strings, each with file and line."""
    found = prose_of_python if path.suffix == ".py" else prose
    return [f"{path.relative_to(ROOT)}:{number} “{word}”" for number, word in found(path.read_text())]


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PROSE_TOKENS:
            for line, word in prose(token.string):
                yield token.start[0] + line - 1, word


def definitions() -> dict[str, list[str]]:
    """Return where classes and functions called by each word of `ONE_MEANING` are defined."""
    found: dict[str, list[str]] = {}
    for path in files(["agent", "common", "deploy", "proxy", "transfer"]):
        if path.suffix == ".py":
            for name, line in defined_in(path.read_text()):
                found.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{line}")
    return found


def defined_in(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            word = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower().strip("_")
            if word in ONE_MEANING:
                yield word, node.lineno


@pytest.mark.parametrize("name", PRODUCT)
def test_the_words_are_those_of_the_field(name: str) -> None:
    assert not [word for path in files([name]) for word in wrong_words(path)]


def test_a_word_has_one_meaning() -> None:
    assert not {name: places for name, places in definitions().items() if len(places) > 1}


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in files(["agent", "common", "deploy", "proxy", "transfer"]):
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() == SAME_MEANING, twice


def test_words_are_found() -> None:
    text = 'class Doorman:\n    """Nobody\n    knocks."""\n    nobody = f"{1} in vain"  # of ours\n'
    assert list(prose_of_python(text)) == [(2, "Nobody"), (3, "knocks"), (4, "in vain"), (4, "of ours")]
    assert list(defined_in("class _FirstToken: pass\ndef take(): pass\ndef intake(): pass")) == [
        ("first_token", 1),
        ("take", 2),
    ]


if __name__ == "__main__":
    for path in files(sys.argv[1:] or PRODUCT):
        print(*wrong_words(path), sep="\n", end="\n" if wrong_words(path) else "")
    print({name: places for name, places in definitions().items() if len(places) > 1})
