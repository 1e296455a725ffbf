# SPDX-License-Identifier: Apache-2.0
"""Empty environments into which the wheel of `make release` is installed, with one of its extras."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import containers  # noqa: F401 (a fixture)
from tests.unit.test_packages import PROJECT
from tests.versions import OF_CUDA, ROOT, install_uv

RELEASE = ROOT / "build" / "release"
PYTHON = os.environ.get("INSTALLED_PYTHON", "")
"""The Python that they are made for; empty where `make test-installed` does not run."""
INSTALL_TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment, and an empty directory outside of any clone."""

    environment: Path
    cwd: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def kvferry(self) -> Path:
        return self.environment / "bin" / "kvferry"

    def run(self, *words: str | Path, timeout_s: float = 60) -> str:
        """What a command prints. Raises AssertionError with its words when it fails."""
        done = subprocess.run(words, cwd=self.cwd, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout


def provenance() -> dict[str, Any]:
    """The statement of how the release was built."""
    [path] = RELEASE.glob("*.provenance.json")
    statement: dict[str, Any] = json.loads(path.read_text())
    return statement


def version_text() -> str:
    """How what `kvferry --version` prints begins, by the provenance."""
    [source] = provenance()["predicate"]["buildDefinition"]["resolvedDependencies"]
    return f"kvferry {PROJECT['version']} ({source['digest']['gitCommit'][:12]}, 20"


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Installed]]:
    """`install("agent")`, or "" for no extra; skips the test where the extra is to be had with CUDA alone."""
    folder = tmp_path_factory.mktemp("installed")
    assert not any((each / ".git").exists() for each in folder.parents)
    (folder / "cwd").mkdir()

    @cache
    def is_made(extra: str) -> bool:
        return _install(folder / f"kvferry-{extra}", extra)

    def get(extra: str) -> Installed:
        if not is_made(extra):
            pytest.skip(f"no CPU build of torch for {PYTHON} here: TORCH_INDEX=… names an index of them")
        return Installed(folder / f"kvferry-{extra}", folder / "cwd")

    yield get
    shutil.rmtree(folder)


def _install(environment: Path, extra: str) -> bool:
    """Return False, and install nothing, where the extra would bring gigabytes of CUDA."""
    [wheel] = RELEASE.glob("kvferry-*.whl")
    uv = install_uv()
    subprocess.run([uv, "venv", "--quiet", "--python", PYTHON, environment], check=True, timeout=60)
    words: list[str | Path]
    words = [uv, "pip", "install", "--python", environment / "bin" / "python",
             "--constraint", ROOT / "constraints.txt", f"{wheel}[{extra}]" if extra else wheel]  # fmt: skip
    planned = subprocess.run(
        [*words, "--dry-run"], check=True, timeout=INSTALL_TIMEOUT_S, text=True, stderr=subprocess.PIPE
    )
    if any(f" + {name}" in planned.stderr for name in OF_CUDA):
        return False
    subprocess.run([*words, "--quiet"], check=True, timeout=INSTALL_TIMEOUT_S)
    return True
