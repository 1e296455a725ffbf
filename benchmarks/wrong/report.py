# SPDX-License-Identifier: Apache-2.0
"""The page of a run, from its raw files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.wrong.faults import FAULTS
from benchmarks.wrong.questions import Outcome, Result
from benchmarks.wrong.systems import SYSTEMS

_SHOWN = 5
"""Kinds of errors, and wrong answers, that the page lists of a cell."""


@dataclass(slots=True)
class Cell:
    """One system under one fault. `dates`: of its waves, in order. `left`: the most blocks after a wave.
    `anew`: how often it was started again, for it answered no more.
    """

    results: list[Result] = field(default_factory=list)
    dates: list[str] = field(default_factory=list)
    left: int = 0
    moved: int = 0
    anew: int = 0

    def count(self, outcome: Outcome) -> int:
        return sum(one.outcome == outcome for one in self.results)

    def details(self, outcome: Outcome) -> Counter[str]:
        return Counter(one.detail for one in self.results if one.outcome == outcome)


def cell_file(directory: Path, system: str, fault: str) -> Path:
    return directory / f"{system}.{fault}.jsonl"


def read_cell(directory: Path, system: str, fault: str) -> Cell:
    """Empty if there is none yet."""
    cell, path = Cell(), cell_file(directory, system, fault)
    for line in path.read_text().splitlines() if path.exists() else ():
        wave = json.loads(line)
        cell.results += [Result(number, Outcome(word), *rest) for number, word, *rest in wave["results"]]
        if wave["date"] not in cell.dates:
            cell.dates.append(wave["date"])
        cell.left = max(cell.left, wave["left"])
        cell.moved += wave["moved"]
        cell.anew += not wave["recovered"]
    return cell


def write_page(directory: Path) -> None:
    """Write README.md beside the raw files."""
    cells = {
        (system, fault): cell
        for system in SYSTEMS
        for fault in FAULTS
        if (cell := read_cell(directory, system, fault)).results
    }
    page = ["# Wrong answers per 1,000 requests under faults, one run"]
    for day, facts in json.loads((directory / "facts.json").read_text()).items():
        about = ", ".join(f"{name} {value}" for name, value in facts.items())
        page.append(f"`make bench-wrong` on {day}: {about}.")
    page += [wrong_table(cells), _whole_table(cells), _errors(cells)]
    (directory / "README.md").write_text("\n\n".join(page) + "\n")


def wrong_table(cells: dict[tuple[str, str], Cell]) -> str:
    """Wrong answers with HTTP 200, per 1,000 requests: a row for each fault, a column for each system."""
    systems = [name for name in SYSTEMS if any(name == system for system, _ in cells)]
    rows = [["wrong with HTTP 200, per 1,000", *(SYSTEMS[name].title for name in systems)]]
    for fault in FAULTS:
        row = [cells.get((name, fault)) for name in systems]
        if any(row):
            rows.append(
                [FAULTS[fault].title, *(_share(cell, Outcome.WRONG) if cell else "–" for cell in row)]
            )
    return _table(rows)


def _whole_table(cells: dict[tuple[str, str], Cell]) -> str:
    columns = (Outcome.WRONG, Outcome.ERROR, Outcome.UNTYPED, Outcome.HUNG)
    names = ("wrong with 200", "typed error", "other error", "hung")
    rows = [
        ["fault", "system", "requests", "right", *names, "blocks left", "KV moved", "started anew", "date"]
    ]
    for fault in FAULTS:
        for system in SYSTEMS:
            if cell := cells.get((system, fault)):
                right = cell.count(Outcome.RIGHT) + cell.count(Outcome.TIE)
                shares = [_share(cell, outcome) for outcome in columns]
                moved = cell.moved if SYSTEMS[system].counts_moves else "–"
                counts = [cell.left, moved, cell.anew]
                figures = [len(cell.results), _per_1000(right, cell), *shares, *counts, ", ".join(cell.dates)]
                rows.append([FAULTS[fault].title, SYSTEMS[system].title, *map(str, figures)])
    return "Per 1,000 requests, but for the last four columns:\n\n" + _table(rows)


def _errors(cells: dict[tuple[str, str], Cell]) -> str:
    lines = ["Errors, and some of the wrong answers:", ""]
    for (system, fault), cell in cells.items():
        found = [f"{cell.count(Outcome.TIE)} ties"] if cell.count(Outcome.TIE) else []
        for outcome in (Outcome.WRONG, Outcome.ERROR, Outcome.UNTYPED):
            most = cell.details(outcome).most_common(_SHOWN)
            shown = ", ".join(f"{count} `{_printable(detail)}`" for detail, count in most)
            found += [f"{outcome}: {shown}"] if most else []
        if found:
            lines.append(f"- {SYSTEMS[system].title}, {FAULTS[fault].title}: {'; '.join(found)}")
    return "\n".join(lines)


def _printable(detail: str) -> str:
    """What models and servers said, without what would break the page."""
    return detail.encode("unicode_escape").decode().replace("`", "'").replace("|", "/")


def _share(cell: Cell, outcome: Outcome) -> str:
    return _per_1000(cell.count(outcome), cell)


def _per_1000(count: int, cell: Cell) -> str:
    return f"{1000 * count / len(cell.results):.4g}"


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
