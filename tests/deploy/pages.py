# SPDX-License-Identifier: Apache-2.0
"""The commands of the pages about deployment, for the tests that execute them as they stand.

A test that executes those under a heading takes them by `steps(page, heading)`, with both words written out:
so `test_pages` finds what is executed. The paragraph before a block says of commands that no test executes
what they need.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (*sorted((ROOT / "docs" / "deploy").glob("*.md")), ROOT / "docs" / "rolling.md")
MARK = "no test executes"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. `heading` is the one above it, `before` the paragraph above it."""

    page: str
    heading: str
    before: str
    text: str

    @property
    def is_marked(self) -> bool:
        """Whether the page says that no test executes it."""
        return MARK in self.before

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in its order."""
    heading, prose, found = "", "", []
    for number, part in enumerate(re.split(r"^```\n", page.read_text(), flags=re.MULTILINE)):
        if number % 2:
            found.append(Block(page.name, heading, prose, part))
        else:
            heading = ([heading, *re.findall(r"^## (.*)$", part, flags=re.MULTILINE)])[-1]
            prose = re.sub(r"\s+", " ", part.strip().rpartition("\n\n")[2])
    return found


def steps(page: str, heading: str) -> list[str]:
    """Return the commands under a heading of a page that a test executes, in their order."""
    [path] = [each for each in PAGES if each.name == page]
    found = [block for block in blocks(path) if block.heading == heading and not block.is_marked]
    assert found, f"{page} has no commands under {heading}"
    return [command for block in found for command in block.commands]
