# SPDX-License-Identifier: Apache-2.0
"""Generates the state diagrams of the pages from the tables in the code, as SVG images.

`python -m tools.lifecycles --write` (or `make lifecycles`) brings `docs/images/lifecycles`, the section of
`docs/architecture.md` and the text behind each such image on any page up to date. It needs `dot`, of Debian's
graphviz; the test that compares does not.
"""

from __future__ import annotations

import ast
import enum
import html
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
IMAGES = ROOT / "docs" / "images" / "lifecycles"
PACKAGES = ("transfer", "agent", "proxy", "common", "deploy")
BEGIN, END = "<!-- lifecycles: begin -->\n", "<!-- lifecycles: end -->\n"
STYLE = """\
  bgcolor=white; nodesep=0.3; ranksep=0.3;
  node [shape=box, style=rounded, height=0.35, margin="0.12,0.04"];
  node [fontname="Helvetica,Arial,sans-serif", fontsize=12];
  edge [arrowsize=0.7, color="#555555"];
  start [shape=circle, style=filled, fillcolor=black, label="", width=0.14, height=0.14];
  end [shape=doublecircle, style=filled, fillcolor=black, label="", width=0.1, height=0.1];"""

Table = Mapping[Any, Collection[Any]]


def tables() -> Iterator[tuple[str, str]]:
    """Yield path and name of every public constant `*_TRANSITIONS`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Name) and target.id.endswith("_TRANSITIONS"):
                        yield path.relative_to(ROOT).as_posix(), target.id


def load(path: str, name: str) -> Table:
    module = importlib.import_module("kvferry." + path.removesuffix(".py").replace("/", "."))
    table: Table = getattr(module, name)
    return table


def image(name: str) -> Path:
    return IMAGES / f"{name.removesuffix('_TRANSITIONS').lower().replace('_', '-')}.svg"


def steps(table: Table) -> list[tuple[str, str]]:
    """Return a table's steps from `start` on; a state without followers leads to `end`."""
    first = next(iter(table))
    if isinstance(first, enum.Enum):
        states = list(type(first))
    else:
        states = [state for state in table if table[state]] + sorted(
            state for state in table if not table[state]
        )
    found = [("start", _label(states[0]))]
    for state in states:
        followers = sorted(table.get(state, ()), key=states.index)
        found += [(_label(state), _label(follower)) for follower in followers]
        found += [(_label(state), "end")] if not followers else []
    return found


def _label(state: object) -> str:
    return state.name.lower() if isinstance(state, enum.Enum) else str(state)


def diagram(name: str, table: Table) -> str:
    """Return a table in the language of graphviz."""
    found = steps(table)
    style = STYLE if any(after == "end" for _, after in found) else STYLE.rpartition("\n")[0]
    arrows = "\n".join(f'  "{before}" -> "{after}";' for before, after in found)
    return f'digraph "{name}" {{\n{style}\n{arrows}\n}}\n'


def shown_steps(svg: str) -> list[tuple[str, str]]:
    """Return the steps that an image shows, sorted: graphviz writes each into it as a title."""
    titles = [html.unescape(title) for title in re.findall("<title>(.*?)</title>", svg)]
    return sorted(
        (before, after) for before, arrow, after in (title.partition("->") for title in titles) if arrow
    )


def as_text(table: Table) -> str:
    """Return a table as text, for those who do not see the image."""
    found: dict[str, list[str]] = {}
    for before, after in steps(table)[1:]:
        if after != "end":
            found.setdefault(before, []).append(after)
    return "; ".join(f"{before} → {', '.join(after)}" for before, after in found.items())


def section() -> str:
    """Return the generated part of the page."""
    parts = []
    for path, name in tables():
        title = name.removesuffix("_TRANSITIONS").replace("_", " ").capitalize()
        target = image(name).relative_to(PAGE.parent).as_posix()
        parts.append(f"**{title}** (`{path}`)\n\n![{as_text(load(path, name))}]({target})\n")
    return "\n" + "\n".join(parts) + "\n"


def with_section(page: str) -> str:
    """Return a page with its generated part replaced. Raises `ValueError` if the marks are missing."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"no {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}{section()}{END}{after}"


def texts() -> dict[str, str]:
    """Return the text behind each image, by its file's name."""
    return {image(name).name: as_text(load(path, name)) for path, name in tables()}


def with_texts(page: str, texts: Mapping[str, str]) -> str:
    """Return a page on which the text behind each image of a table is that of the table."""
    return re.sub(
        r"!\[[^\]]*\]\(([./\w]*images/lifecycles/([\w-]+\.svg))\)",
        lambda match: f"![{texts[match[2]]}]({match[1]})",
        page,
    )


def outdated() -> dict[Path, Table]:
    """Return the images that do not show their table, and the tables."""
    found = {image(name): load(path, name) for path, name in tables()}
    return {
        path: table
        for path, table in found.items()
        if not path.exists() or shown_steps(path.read_text()) != sorted(steps(table))
    }


def write() -> None:
    # Others stay as they are: another version of graphviz would change every file.
    for path, table in outdated().items():
        path.parent.mkdir(exist_ok=True)
        words = ["dot", "-Tsvg", "-o", str(path)]
        subprocess.run(words, input=diagram(path.stem, table), text=True, check=True)
    PAGE.write_text(with_section(PAGE.read_text()))
    known = texts()
    for page in (ROOT / "docs").rglob("*.md"):
        before = page.read_text()
        after = with_texts(before, known)
        if after != before:
            page.write_text(after)


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        print(section())
