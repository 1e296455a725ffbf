# SPDX-License-Identifier: Apache-2.0
"""Everything is installed as `kvferry.…`: modules of other people with our folders' names change nothing.

`test_readme.py` starts a whole cluster in such a place.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.system.conftest import FOLDERS
from tools.release import build_packages

ROOT = Path(__file__).parents[2]
KVFERRY = Path(sys.executable).with_name("kvferry")


def test_the_traps_are_set(trap_folder: Path, trap_env: dict[str, str]) -> None:
    for name in FOLDERS:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            cwd=trap_folder,
            env=trap_env,
            capture_output=True,
            text=True,
        )
        assert "was imported" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [KVFERRY, "--help"],
        [KVFERRY, "--version"],
        [KVFERRY, "proxy", "--help"],
        [KVFERRY, "agent", "--help"],
        [KVFERRY, "agent", "--attach", "http://127.0.0.1:1", "--help"],
        [KVFERRY, "up", "--help"],
        [KVFERRY, "doctor"],
        [KVFERRY, "keygen", "cluster.key"],
        [sys.executable, "-m", "kvferry.proxy", "--help"],
        [sys.executable, "-m", "kvferry.agent", "--help"],
        [sys.executable, "-m", "kvferry.deploy", "--help"],
    ],
    ids=lambda words: " ".join(Path(word).name for word in words),
)
def test_a_command(words: list[str], trap_folder: Path, trap_env: dict[str, str]) -> None:
    done = subprocess.run(words, cwd=trap_folder, env=trap_env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.timeout(180)
def test_the_wheel_holds_everything(tmp_path: Path) -> None:
    """Every file of the product is in it, and it runs in an environment that knows no checkout."""
    source, wheels, venv = tmp_path / "source", tmp_path / "wheels", tmp_path / "venv"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build_packages(source, wheels, epoch_s=1_700_000_000)
    [wheel] = wheels.glob("kvferry-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {f"kvferry/{name.replace('deploy/models/', 'models/', 1)}" for name in files}

    _run(sys.executable, "-m", "venv", "--without-pip", venv)
    _run(sys.executable, "-m", "pip", "--python", venv, "install", "-qq", "--no-deps", "--no-index", wheel)
    [site] = venv.glob("lib/python*/site-packages")
    # Their dependencies, without the editable install of the checkout: its hook is a .pth file, and those are
    # read only where Python itself looks for them.
    dependencies = next(path for path in sys.path if Path(path, "msgspec").is_dir())
    site.joinpath("dependencies.pth").write_text(f"{dependencies}\n")
    where = _run(
        venv / "bin/python", "-c", "import kvferry.proxy.server as m; print(m.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(venv)
    assert "kvferry COMMAND --help" in _run(venv / "bin/kvferry", "--help", cwd=tmp_path)
    assert "--max-model-len" in _run(venv / "bin/kvferry", "agent", "--help", cwd=tmp_path)
    found = "import kvferry.agent.cli as cli; print(cli.parse_config(['--model', 'ferry-tiny']).model)"
    model = _run(venv / "bin/python", "-c", found, cwd=tmp_path).strip()
    assert Path(model).is_relative_to(venv) and Path(model, "model.safetensors").is_file()


def _run(*words: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
