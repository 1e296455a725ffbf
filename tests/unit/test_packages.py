# SPDX-License-Identifier: Apache-2.0
"""R22: what our packages import is what pyproject.toml declares, extra by extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("agent", "common", "deploy", "proxy", "transfer")
OF_EXTRA = {
    "agent": {"agent", "deploy/doctor", "transfer"},
    "bench": {"deploy/bench/plot"},
    "cuda": {"transfer/backends/cuda_ipc"},
    "mooncake": {"transfer/backends/mooncake"},
    "mori": {"transfer/backends/mori"},
    "nixl": {"transfer/backends/nixl"},
    "otel": {"common/telemetry/spans.py"},
    "ray": {"deploy/ray"},
}
"""What runs only where an extra is installed; all else of ours needs nothing but `dependencies`."""
APART = {"sglang": "agent/sglang", "vllm": "agent/vllm"}
"""What no extra brings, and where it may be imported: these load us."""
DISTRIBUTIONS = {"mori": {"amd-mori"}} | {name: {name} for name in ("matplotlib", "ray", "triton")}
"""Of what is not installed where tests run."""


def normalized(requirement: str) -> str:
    """Return the name of a requirement as PEP 503 spells it."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def declared(extras: Iterable[str] = ()) -> set[str]:
    """Return what `pip install kvferry[extras]` names."""
    names = {normalized(line) for line in PROJECT["dependencies"]}
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            own = re.match(r"kvferry\[([\w,]+)\]", line)
            names |= declared(own[1].split(",")) if own else {normalized(line)}
    return names


def imports(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, ours and Python's left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - {*sys.stdlib_module_names, "_typeshed", "kvferry"}


def undeclared(files: Iterable[Path]) -> dict[str, set[str]]:
    """Return what files import without declaring it, each with those files."""
    owners = {name: {normalized(dist) for dist in of} for name, of in packages_distributions().items()}
    owners = DISTRIBUTIONS | owners
    missing: dict[str, set[str]] = defaultdict(set)
    for path in files:
        file = path.relative_to(ROOT).as_posix()
        extras = [name for name, folders in OF_EXTRA.items() if any(map(file.startswith, folders))]
        for name in imports(path):
            if file.startswith(APART.get(name, "nowhere")):
                continue
            if not owners.get(name, {name}) & declared(extras):
                missing[name].add(file)
    return dict(missing)


def test_everything_imported_is_declared() -> None:
    files = [path for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    assert not undeclared(files)


def test_everything_declared_is_imported() -> None:
    files = [path for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    owners: dict[str, Iterable[str]] = {**DISTRIBUTIONS, **packages_distributions()}
    used = {normalized(dist) for path in files for name in imports(path) for dist in owners.get(name, ())}
    # The distribution `nixl` is a shell around those that hold the package.
    assert declared([*OF_EXTRA]) - used <= {"nixl"}


@pytest.mark.parametrize("name", ["torch", "numpy", "transformers"])
def test_an_import_that_is_not_declared_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    proxy, agent = tmp_path / "proxy.py", tmp_path / "agent.py"
    for path in (proxy, agent):
        path.write_text(f"import {name}")
    assert undeclared([proxy, agent]) == {name: {"proxy.py"}}


def test_the_extra_all_has_every_extra_that_users_need() -> None:
    """Except `mori`: where glibc is too old for its wheel, pip would install nothing."""
    assert declared(["all"]) == declared(OF_EXTRA.keys() - {"mori"})
