# SPDX-License-Identifier: Apache-2.0
"""The blocks of the pages about deployment, for the tests that execute them as they stand.

A test takes those under a heading by `scripts(page, heading)` or `steps(page, heading)`, with both words
written out: so `test_pages` finds what is executed. The paragraph before a block that no test executes says
"needs …; no test executes …", or the page does before its first heading: "Blocks with `helm` need …; no test
executes …". `needing` returns those, for tests that do a part of what they say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (*sorted((ROOT / "docs" / "deploy").glob("*.md")), ROOT / "docs" / "rolling.md")
MARK = re.compile(r"\b[Nn]eeds? ([^.;]+); no test executes ")
ONCE = re.compile(r"Blocks with ([^.;]+) need ([^.;]+); no test executes ")
# Only these are a reason to execute nothing.
LACKING = ("a cluster", "GPUs", "a registry of images")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. `heading` is the one above it.

    `needs`: what the page says it needs that no test has; empty if a test executes it.
    """

    page: str
    heading: str
    needs: str
    text: str

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in its order."""
    heading, prose, found = "", "", []
    text = page.read_text()
    once = ONCE.search(" ".join(text.partition("\n## ")[0].split()))
    for number, part in enumerate(re.split(r"^```.*\n", text, flags=re.MULTILINE)):
        if number % 2:
            marked = MARK.search(prose)
            needs = marked[1] if marked else _needs_once(once, part)
            found.append(Block(page.name, heading, needs, part))
        else:
            heading = ([heading, *re.findall(r"^## (.*)$", part, flags=re.MULTILINE)])[-1]
            prose = re.sub(r"\s+", " ", part.strip().rpartition("\n\n")[2])
    return found


def _needs_once(once: re.Match[str] | None, text: str) -> str:
    programs = re.findall(r"`(\w+)`", once[1]) if once else []
    return once[2] if once and re.search(rf"^({'|'.join(programs)}) ", text, re.MULTILINE) else ""


def scripts(page: str, heading: str) -> list[str]:
    """Return the blocks under a heading of a page that a test executes, in their order."""
    found = [each.text for each in _under(page, heading) if not each.needs]
    assert found, f"{page} has nothing that is executed under {heading}"
    return found


def steps(page: str, heading: str) -> list[str]:
    """Return the commands under a heading of a page that a test executes, in their order."""
    return [command for each in _under(page, heading) if not each.needs for command in each.commands]


def needing(page: str, heading: str, what: str) -> list[str]:
    """Return the commands under a heading that need something that is not here."""
    found = [command for each in _under(page, heading) if what in each.needs for command in each.commands]
    assert found, f"{page} has nothing that needs {what} under {heading}"
    return found


def _under(page: str, heading: str) -> list[Block]:
    [path] = [each for each in PAGES if each.name == page]
    return [each for each in blocks(path) if each.heading == heading]
