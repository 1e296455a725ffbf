# SPDX-License-Identifier: Apache-2.0
"""Backends share `common` and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvferry.transfer.backends

ROOT = Path(kvferry.transfer.backends.__file__).parent
PREFIX = "kvferry.transfer.backends."


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
def test_no_backend_imports_another_and_common_imports_none(folder: str) -> None:
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PREFIX):
                assert str(node.module).removeprefix(PREFIX).split(".")[0] in (folder, "common"), path
