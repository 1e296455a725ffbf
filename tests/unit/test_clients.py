# SPDX-License-Identifier: Apache-2.0
"""What docs/clients.md shows is what `make test-clients` runs, and all of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.clients.page import PAGE, ROOT, clients, printed

RUNS = Path(__file__).parents[1] / "clients" / "test_clients.py"


def test_every_command_is_run_and_every_script_is_compared() -> None:
    names = {
        call.args[0].value
        for call in ast.walk(ast.parse(RUNS.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "installed"
        if isinstance(call.args[0], ast.Constant)
    }
    assert {client.name for client in clients().values() if client.commands} == names
    for client in clients().values():
        assert client.packages, client.name
        assert client.scripts or client.commands, client.name
        for script in client.scripts:
            if client.name != "java":
                ast.parse(script)
            assert len(printed(script)) == len(re.findall(r"\bprint(?:ln)?\(", script)) > 0


def test_every_block_of_the_page_is_in_a_section() -> None:
    blocks = PAGE.read_text().count("\n```") // 2
    shown = sum(1 + len(client.scripts) + bool(client.commands) for client in clients().values())
    assert blocks == shown


def test_the_files_that_the_commands_name_are_there() -> None:
    words = [word for client in clients().values() for command in client.commands for word in command]
    values = [value for word in words for part in word.split(",") for value in part.split("=")]
    named = [value for value in values if value.startswith(("deploy/", "tests/"))]
    assert named
    assert [value for value in named if not (ROOT / value).exists()] == []
