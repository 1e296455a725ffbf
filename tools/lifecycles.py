# SPDX-License-Identifier: Apache-2.0
"""Generates the state diagrams of `docs/architecture.md` from the tables in the code.

`python -m tools.lifecycles --write` (or `make lifecycles`) brings the page up to date.
"""

from __future__ import annotations

import ast
import enum
import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("transfer", "agent", "proxy", "deploy")
BEGIN, END = "<!-- lifecycles: begin -->\n", "<!-- lifecycles: end -->\n"


def tables() -> Iterator[tuple[str, str]]:
    """Yield path and name of every public constant `*_TRANSITIONS`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Name) and target.id.endswith("_TRANSITIONS"):
                        yield path.relative_to(ROOT).as_posix(), target.id


def load(path: str, name: str) -> Mapping[Any, Collection[Any]]:
    module = importlib.import_module("kvferry." + path.removesuffix(".py").replace("/", "."))
    table: Mapping[Any, Collection[Any]] = getattr(module, name)
    return table


def diagram(table: Mapping[Any, Collection[Any]]) -> str:
    """Return a table in Mermaid's notation, in the order of its enum. A state without followers is an end."""
    first = next(iter(table))
    if isinstance(first, enum.Enum):
        states = list(type(first))
    else:
        states = [state for state in table if table[state]] + sorted(
            state for state in table if not table[state]
        )
    lines = [f"  [*] --> {_label(states[0])}"]
    for state in states:
        followers = sorted(table.get(state, ()), key=states.index)
        lines += [f"  {_label(state)} --> {_label(follower)}" for follower in followers]
        lines += [f"  {_label(state)} --> [*]"] if not followers else []
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def _label(state: object) -> str:
    return state.name.lower() if isinstance(state, enum.Enum) else str(state)


def section() -> str:
    """Return the generated part of the page."""
    parts = []
    for path, name in tables():
        title = name.removesuffix("_TRANSITIONS").replace("_", " ").capitalize()
        parts.append(f"**{title}** (`{path}`)\n\n{diagram(load(path, name))}\n")
    return "\n" + "\n".join(parts) + "\n"


def with_section(page: str) -> str:
    """Return a page with its generated part replaced. Raises `ValueError` if the marks are missing."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"no {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}{section()}{END}{after}"


if __name__ == "__main__":
    text = with_section(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(text)
    else:
        print(section())
