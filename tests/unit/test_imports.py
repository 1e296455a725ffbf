# SPDX-License-Identifier: Apache-2.0
"""Imports run one way, and the proxy never pays for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"proxy", "agent", "transfer", "deploy", "tests"}
ALLOWED = {
    "transfer": {"transfer"},
    "proxy": {"proxy"},
    "agent": {"agent", "transfer", "proxy.wire"},
    "deploy": {"deploy", "agent", "transfer", "proxy"},
}


def imported(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for name in imported(path):
            if name.split(".")[0] not in OURS or name == "proxy":
                continue
            assert any(name == fine or name.startswith(f"{fine}.") for fine in ALLOWED[package]), (path, name)


@pytest.mark.parametrize(
    "module", ["proxy.app", "proxy.command", "agent.command", "agent.engine", "deploy.cli", "deploy.sidecar"]
)
def test_torch_stays_out(module: str) -> None:
    """Only ranks import torch and transformers: everything else must start fast and stay small."""
    code = (
        f"import sys, importlib; importlib.import_module({module!r}); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_proxy_imports_nothing_of_the_others() -> None:
    code = (
        "import sys, proxy.app; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'agent', 'transfer', 'deploy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_source_file_has_a_licence_line() -> None:
    """R8."""
    for package in (*ALLOWED, "tests"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stat().st_size:
                assert "SPDX-License-Identifier: Apache-2.0" in path.read_text().splitlines()[0], path
