# SPDX-License-Identifier: Apache-2.0
"""Reads files that operators write in YAML: plain data of a bounded size and depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 8
"""Maps and lists within each other."""


class _PlainLoader(yaml.SafeLoader):
    """Without aliases, by which a small file can stand for any amount of data."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*NAME) is not allowed here")
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                raise yaml.YAMLError(f"more than {MAX_DEPTH} maps and lists lie within each other")
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def read_yaml(path: Path) -> Any:
    """Return what a file holds. Raises OSError, and ValueError that names the file and says what is wrong."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"{str(path)!r} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return yaml.load(raw.decode(), _PlainLoader)
    except yaml.MarkedYAMLError as error:
        problem, mark = error.problem or error.context, error.problem_mark or error.context_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{str(path)!r} is not YAML: {problem}{where}") from error
    except yaml.reader.ReaderError as error:
        why = f"it has the character {error.character!r} at {error.position}"
        raise ValueError(f"{str(path)!r} is not YAML: {why}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(f"{str(path)!r} is not YAML: {error}") from error
