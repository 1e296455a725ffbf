# SPDX-License-Identifier: Apache-2.0
"""What `make bench-wrong` makes of answers and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from benchmarks.wrong.questions import DISTINCT, Asker, Outcome, Reference, questions
from benchmarks.wrong.report import cell_file, read_cell, write_page

ROOT = Path(__file__).parents[2]
REFERENCE = Reference("1234", ["12", "3", "4"], [9.0, 1e-4, 9.0])


def test_questions_are_distinct_and_neighbours_are_about_different_lists() -> None:
    asked = questions()
    lists = [text.rpartition("?")[0] for text in asked]
    assert len(set(asked)) == DISTINCT and asked == questions()
    assert len(set(lists[: DISTINCT // 4])) == DISTINCT // 4 and lists[0] == lists[DISTINCT // 4]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("1234", "right"),
        ("1239", "wrong"),
        ("1294", "tie"),
        ("9234", "wrong"),
        ("12345", "wrong"),
        ("", "wrong"),
    ],
)
def test_a_difference_is_a_tie_only_where_the_plain_server_was_undecided(text: str, outcome: str) -> None:
    assert REFERENCE.judge(text) == outcome


@pytest.mark.parametrize(
    ("status", "text", "stream", "outcome"),
    [
        (200, json.dumps({"choices": [{"text": "1234"}]}), False, "right"),
        (503, json.dumps({"error": {"code": "no_agents"}}), False, "error"),
        (503, "no worker", False, "untyped"),
        (200, 'data: {"choices": [{"text": "1234"}]}\n\ndata: [DONE]\n\n', True, "right"),
        (200, 'data: {"choices": [{"text": "1234"}]}\n\n', True, "untyped"),
        (200, 'data: {"error": {"code": "lost"}}\n\ndata: [DONE]\n\n', True, "error"),
    ],
)
async def test_what_becomes_of_a_request(status: int, text: str, stream: bool, outcome: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert (await request.json())["stream"] == stream
        kind = "application/json" if text.startswith("{") else "text/plain"
        return web.Response(status=status, text=text, content_type=kind)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, ClientSession() as http:
        asker = Asker(str(server.make_url("")), http, ["?"] * 2, [REFERENCE] * 2)
        assert (await asker.ask(int(stream))).outcome == outcome


def test_the_page_counts_per_1000_requests_over_all_waves(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"2026-11-26": {"vllm": "0.32.0"}}')
    waves = [
        {"results": [[0, "right", 0.1], [1, "wrong", 0.1, "9"]], "left": 0, "moved": 2, "recovered": True},
        {"results": [[2, "hung", 60], [3, "tie", 0.1, "8"]], "left": 7, "moved": 1, "recovered": False},
    ]
    waves = [{"date": f"2026-11-2{day}", **wave} for day, wave in enumerate(waves, 6)]
    cell_file(tmp_path, "kvferry", "flip").write_text("".join(f"{json.dumps(wave)}\n" for wave in waves))
    cell = read_cell(tmp_path, "kvferry", "flip")
    assert (cell.count(Outcome.WRONG), cell.left, cell.moved, cell.anew) == (1, 7, 3, 1)
    write_page(tmp_path)
    [row] = [line for line in (tmp_path / "README.md").read_text().splitlines() if "| 7 |" in line]
    assert row.split(" | ")[2:] == [
        "4",
        "500",
        "250",
        "0",
        "0",
        "250",
        "7",
        "3",
        "1",
        "2026-11-26, 2026-11-27 |",
    ]


def test_the_page_of_docs_has_the_tables_of_its_run() -> None:
    shown = (ROOT / "docs" / "wrong-answers.md").read_text()
    run = ROOT / "benchmarks" / "results" / "2026-11-26-wrong" / "README.md"
    tables = [line for line in run.read_text().splitlines() if line.startswith("|")]
    assert tables and tables == [line for line in shown.splitlines() if line.startswith("|")][: len(tables)]
