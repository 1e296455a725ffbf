# SPDX-License-Identifier: Apache-2.0
"""Imports run one way, and the proxy never pays for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "transfer": {"transfer"},
    "proxy": {"proxy"},
    "agent": {"agent", "transfer", "proxy.wire"},
    "deploy": {"deploy", "agent", "transfer", "proxy"},
}


def imported(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, wherever in the file, without their `kvferry.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    roots = {name.partition(".")[0] for name in names}
    assert not roots & {*ALLOWED, "tests", "tools"}, f"{path}: nothing of ours is installed under that name"
    return {name.removeprefix("kvferry.") for name in names if name.startswith("kvferry.")}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for name in imported(path):
            assert any(name == fine or name.startswith(f"{fine}.") for fine in ALLOWED[package]), (path, name)


@pytest.mark.parametrize(
    "module",
    [
        "kvferry.proxy.api.app",
        "kvferry.proxy.cli",
        "kvferry.agent.cli",
        "kvferry.agent.engine.process",
        "kvferry.deploy.cli",
        "kvferry.deploy.sidecar",
    ],
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
        "import sys, kvferry.proxy.api.app; "
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('kvferry.')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "['proxy']"


def test_every_package_is_installed() -> None:
    """A folder that `pyproject.toml` does not list is missing from the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for top in ALLOWED for path in (ROOT / top).rglob("__init__.py")}
    assert sorted(listed) == sorted(".".join(("kvferry", *folder.parts)) for folder in folders)


def test_every_source_file_has_a_licence_line() -> None:
    """R8."""
    for package in (*ALLOWED, "tests", "tools"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stat().st_size:
                assert "SPDX-License-Identifier: Apache-2.0" in path.read_text().splitlines()[0], path
