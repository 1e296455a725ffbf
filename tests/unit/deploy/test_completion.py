# SPDX-License-Identifier: Apache-2.0
"""Words that shells complete: asked of bash, zsh and fish themselves, as their user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.deploy.cli import COMMANDS
from kvferry.deploy.completion import PARSERS, SETTINGS, SHELLS, main

# Each runs the line's completion and prints the words.
BASH = """
eval "$(kvferry completion bash)"
COMP_LINE=$1; COMP_POINT=${#1}; COMP_TYPE=9
_python_argcomplete kvferry
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'kvferry completion fish | source; complete --do-complete "$argv[1]"; true'
LINES = [
    ("kvferry be", {"bench"}),
    ("kvferry proxy --decode-po", {"--decode-policy"}),
    ("kvferry proxy --decode-policy le", {"least_work"}),
    ("kvferry agent --attach http://a:1 --dialec", {"--dialect"}),
    ("kvferry agent --engine v", {"vllm"}),
    ("kvferry agent --engine vllm --start", {"--start-timeout-s"}),
    ("kvferry up --decode.lease", {"--decode.lease-s"}),
    ("kvferry up --engine vllm --agent.start", {"--agent.start-timeout-s"}),
    ("kvferry bench one=http://a:1 --tt", {"--ttft-ms"}),
    ("kvferry status --js", {"--json"}),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A search path on which `kvferry` is this one."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "kvferry"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvferry.deploy.cli "$@"\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def completed(words: list[str], path: str, tmp_path: Path) -> set[str]:
    done = subprocess.run(
        words, env={**os.environ, "PATH": path, "HOME": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {line.partition("\t")[0].strip() for line in done.stdout.splitlines()}  # fish describes words


@pytest.mark.parametrize(("line", "words"), LINES)
def test_bash_completes(line: str, words: set[str], path: str, tmp_path: Path) -> None:
    assert completed(["bash", "--norc", "-c", BASH, "bash", line], path, tmp_path) == words


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("line", "words"), LINES)
def test_fish_completes(line: str, words: set[str], path: str, tmp_path: Path) -> None:
    assert completed(["fish", "--no-config", "-c", FISH, line], path, tmp_path) == words


def test_every_command_is_completed() -> None:
    assert {*SETTINGS, *PARSERS} == {*COMMANDS}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_for_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    printed = capsys.readouterr().out
    assert ("complete --command kvferry" if shell == "fish" else "compdef") in printed
