# SPDX-License-Identifier: Apache-2.0
"""Unit tests with the versions of Python and of requirements that pyproject.toml allows.

`make test-versions` runs `python -m tests.versions [--cuda] [PART…]`, where a part is

- `proxy-lowest`, `proxy-highest`, `agent-lowest`, `agent-highest`: versions of requirements with this Python;
- `proxy-3.12`, `agent-3.12` and so on: another Python, with the highest versions (not all of the lowest have
  a wheel for a newer Python);
- `beside-vllm`, which uv resolves, and nothing is installed.

All of them when none is named. Each gets an environment of its own, made by uv. What cannot be had here is
skipped. The last lines say of each part whether it passed, failed or was skipped, and its Python and torch.
CI does not run it: it takes what indexes have on that day.

Interpreters are those on PATH and those of pyenv. Of most versions of torch an index may have CUDA builds
alone, which are gigabytes. In place of one of these the torch of `make env` is taken, if it is for the same
Python. An index of CPU builds can be given by the environment variable TORCH_INDEX; `--cuda` takes the CUDA
builds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.system.vllm.install import VLLM

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "versions"
WITH_AGENT = [
    "tests/unit/proxy/dialects/test_dialect_table.py",
    "tests/unit/proxy/test_tls.py::test_nothing_starts_without_the_configured_certificate[agent]",
    "tests/unit/common/telemetry/test_tracing.py::test_off_nothing_of_opentelemetry_is_imported",
]
"""The proxy's tests that need an agent too."""
WITHOUT_AGENT = [f"--{'deselect' if '::' in test else 'ignore'}={test}" for test in WITH_AGENT]
TESTS = {
    "proxy": (["otel"], ["tests/unit/common", "tests/unit/proxy", *WITHOUT_AGENT]),
    "agent": (["agent", "otel"], ["tests/unit/agent", "tests/unit/transfer", *WITH_AGENT]),
}
"""Of each part its extras, and what is run."""
BESIDE_VLLM = "beside-vllm"
RESOLUTIONS = {"lowest": "lowest-direct", "highest": "highest"}
THIS_PYTHON = "{}.{}".format(*sys.version_info)
PYTHONS = [each for each in ("3.11", "3.12", "3.13", "3.14") if each != THIS_PYTHON]
TOOLS = {
    "anthropic",
    "hypothesis",
    "numpy",
    "openai",
    "psutil",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "schemathesis",
    "tokenizers",
}
"""What the tests themselves need, in CI's versions."""
CUDA = "--cuda"
OF_CUDA = ("nvidia-", "cuda-")
"""How the names begin of what only CUDA builds of torch require."""
UV_SETTINGS = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "UV_INDEX": "TORCH_INDEX"}
"""Environment variables of uv, and whose values they get."""


class NotHere(Exception):
    """What a part needs cannot be had on this machine."""


def main(words: list[str]) -> int:
    """Return 1 if a part failed. Raises `CalledProcessError` when an environment cannot be made."""
    parts, takes_cuda = [word for word in words if word != CUDA], CUDA in words
    known = [*(f"{name}-{edge}" for edge in (*RESOLUTIONS, *PYTHONS) for name in TESTS), BESIDE_VLLM]
    if unknown := set(parts) - set(known):
        print(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, pyenv.glob("versions/*/bin"))])
    uv = install_uv()
    outcomes = {part: _outcome(uv, part, takes_cuda) for part in parts or known}
    print(*(f"{part}: {outcome}" for part, outcome in outcomes.items()), sep="\n", flush=True)
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def install_uv() -> Path:
    """Return where uv is, which is installed first; it takes packages from where pip does."""
    os.environ |= {ours: os.environ[name] for ours, name in UV_SETTINGS.items() if os.environ.get(name)}
    uv = HOME / "uv"
    if not (uv / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", uv], check=True)
        subprocess.run([uv / "bin" / "pip", "install", "-qq", "uv"], check=True)
    return uv / "bin" / "uv"


def _outcome(uv: Path, part: str, takes_cuda: bool) -> str:
    """Run a part. Return `passed`, `failed` or `skipped`, and with what or why."""
    if part == BESIDE_VLLM:
        return "passed" if _fits_beside_vllm(uv) else "failed"
    name, _, edge = part.partition("-")
    try:
        python = _find_python(uv, edge) if edge in PYTHONS else Path(sys.executable)
        pins = _resolve(uv, part, python, takes_cuda)
    except NotHere as error:
        return f"skipped: {error}"
    venv = HOME / part
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", python, venv], check=True)
    versions = _install(uv, venv, pins)
    print(f"{part}: {' '.join(versions)}", flush=True)
    run: list[str | Path] = [
        venv / "bin" / "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not full",
        "-n",
        "2",
    ]
    passed = subprocess.run([*run, *TESTS[name][1]], cwd=ROOT).returncode == 0
    ran_with = [_output(venv / "bin" / "python", "--version"), *_of_torch(versions)]
    return f"{'passed' if passed else 'failed'} with {', '.join(ran_with)}"


def _of_torch(pins: list[str]) -> list[str]:
    return [line for line in pins if line.startswith("torch=")]


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def _find_python(uv: Path, wanted: str) -> Path:
    """Raises `NotHere`."""
    try:
        return Path(_output(uv, "python", "find", "--no-project", "--no-python-downloads", wanted))
    except subprocess.CalledProcessError as error:
        raise NotHere(f"no Python {wanted}") from error


def _install(uv: Path, venv: Path, pins: Path) -> list[str]:
    """Install what is pinned, kvferry and the tests' tools. Return all versions."""
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", venv / "bin" / "python"]
    subprocess.run([*install, "--requirement", pins, "--no-deps", "--editable", "."], check=True, cwd=ROOT)
    # What is a tool and one of ours too has its version already.
    held = {line.partition("==")[0].lower() for line in pins.read_text().splitlines()}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    tools = [line for line in pinned if line.partition("==")[0].lower() in TOOLS - held]
    subprocess.run([*install, "--constraint", pins, *tools], check=True, cwd=ROOT)
    return _output(uv, "pip", "freeze", "--python", venv / "bin" / "python").splitlines()


def _fits_beside_vllm(uv: Path) -> bool:
    """Whether `kvferry[agent]` can be installed into vLLM's environment without moving a version of it.

    What vLLM's CPU build requires is resolved as if it were alone, then our requirements with exactly that.
    """
    wanted, pins = HOME / "vllm.in", HOME / "vllm.txt"
    # vLLM wants torch's CPU build, whose version is not on every index; any build is as good here.
    torch = HOME / "torch.txt"
    [pinned] = _of_torch((ROOT / "constraints.txt").read_text().splitlines())
    torch.write_text(f"{pinned}\n")
    wanted.write_text(f"{VLLM}\n")
    resolved: list[str | Path] = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-annotate",
        "--python",
        sys.executable,
    ]
    resolved += ["--override", torch]
    subprocess.run([*resolved, "--output-file", pins, wanted], check=True, cwd=ROOT)
    ours: list[str | Path] = [
        "--constraint",
        pins,
        "--extra",
        "agent",
        "--output-file",
        HOME / "beside-vllm.txt",
    ]
    return subprocess.run([*resolved, *ours, "pyproject.toml"], cwd=ROOT).returncode == 0


def _resolve(uv: Path, part: str, python: Path, takes_cuda: bool) -> Path:
    """Write the versions of a part into a file, without a CUDA build of torch unless that is asked for.

    Raises `NotHere` if the index has no other, and `make env` has none for this Python.
    """
    name, _, edge = part.partition("-")
    pins = HOME / f"{part}.txt"
    words: list[str | Path] = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-annotate",
        "--python",
        python,
        "pyproject.toml",
    ]
    words += ["--resolution", RESOLUTIONS.get(edge, "highest"), "--output-file", pins, "--no-header"]
    words += [f"--extra={extra}" for extra in TESTS[name][0]]
    pins.unlink(missing_ok=True)  # else its versions would be preferred
    subprocess.run(words, check=True, cwd=ROOT)
    lines = pins.read_text().splitlines()
    if not takes_cuda and any(line.startswith(OF_CUDA) for line in lines):
        [wanted] = _of_torch(lines)
        if edge in PYTHONS:
            raise NotHere(f"for Python {edge} the index has {wanted} for CUDA alone")
        taken = HOME / "torch.txt"
        taken.write_text(f"torch=={version('torch')}\n")
        print(f"{part}: {taken.read_text().strip()}, as the index has {wanted} for CUDA alone", flush=True)
        pins.unlink()
        subprocess.run([*words, "--constraint", taken], check=True, cwd=ROOT)
    return pins


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
