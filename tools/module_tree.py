# SPDX-License-Identifier: Apache-2.0
"""The tree of modules in docs/architecture.md: each captioned by the first sentence of its docstring.

`python -m tools.module_tree --write` (or `make reference`) brings the page up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("proxy", "agent", "transfer", "common", "deploy")
BEGIN, END = "<!-- tree: begin -->\n", "<!-- tree: end -->\n"
WIDTH = 26
"""The column at which captions start."""
MAX_CHARS = 90


def caption(path: Path) -> str:
    """Return the first sentence of a module's docstring, or its first clause if it is long."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = text.partition("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0].rstrip(".:")
    return sentence if len(sentence) <= MAX_CHARS else re.split(r"[:;]\s", sentence, maxsplit=1)[0]


def lines(folder: Path, indent: str = "") -> Iterator[str]:
    """Yield the lines of a folder of modules: the modules first, then the folders."""
    yield f"{indent + folder.name + '/':<{WIDTH}}{caption(folder / '__init__.py')}"
    indent += "  "
    for path in sorted(folder.glob("*.py"), key=lambda path: path.stem.strip("_")):
        if path.name != "__init__.py":
            yield f"{indent + path.stem:<{WIDTH}}{caption(path)}"
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").exists():
            yield from lines(path, indent)


def with_section(page: str) -> str:
    """Return the page with the tree of the disk between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    tree = "\n".join(line.rstrip() for package in PACKAGES for line in lines(ROOT / package))
    return f"{before}{BEGIN}```\n{tree}\n```\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_section(PAGE.read_text()))
    else:
        sys.exit("usage: python -m tools.module_tree --write")
