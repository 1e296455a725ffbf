# SPDX-License-Identifier: Apache-2.0
"""Unit tests with the lowest and highest versions that pyproject.toml allows. Used by `make test-versions`.

`python -m tests.versions [--cuda] [PART…]`, where a part is `proxy-lowest`, `proxy-highest`, `agent-lowest`,
`agent-highest` or `beside-vllm`; all of them when none is named. Each gets an environment of its own, made by
uv, but for the last: that resolves, and installs nothing.

Of most versions of torch an index may have CUDA builds alone, which are gigabytes. In place of one of these
the torch of `make env` is taken, and a line says so. An index of CPU builds can be given by the environment
variable TORCH_INDEX; `--cuda` takes the CUDA builds.
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
TESTS = {
    "proxy": (
        ["otel"],
        [
            "tests/unit/common",
            "tests/unit/proxy",
            *(f"--{'deselect' if '::' in test else 'ignore'}={test}" for test in WITH_AGENT),
        ],
    ),
    "agent": (["agent", "otel"], ["tests/unit/agent", "tests/unit/transfer", *WITH_AGENT]),
}
"""Of each part its extras, and what is run."""
BESIDE_VLLM = "beside-vllm"
RESOLUTIONS = {"lowest": "lowest-direct", "highest": "highest"}
TOOLS = {
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


def main(words: list[str]) -> int:
    """Return 1 if a part failed. Raises `CalledProcessError` when an environment cannot be made."""
    parts, takes_cuda = [word for word in words if word != CUDA], CUDA in words
    known = [*(f"{name}-{edge}" for name in TESTS for edge in RESOLUTIONS), BESIDE_VLLM]
    if unknown := set(parts) - set(known):
        print(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    program = install_uv()
    failed = [
        part
        for part in parts or known
        if not (_fits_beside_vllm(program) if part == BESIDE_VLLM else _passes(program, part, takes_cuda))
    ]
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


def install_uv() -> Path:
    """Return where uv is, which is installed first; it takes packages from where pip does."""
    os.environ |= {ours: os.environ[name] for ours, name in UV_SETTINGS.items() if os.environ.get(name)}
    uv = HOME / "uv"
    if not (uv / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", uv], check=True)
        subprocess.run([uv / "bin" / "pip", "install", "-qq", "uv"], check=True)
    return uv / "bin" / "uv"


def _fits_beside_vllm(uv: Path) -> bool:
    """Whether `kvferry[agent]` can be installed into vLLM's environment without moving a version of it.

    What vLLM's CPU build requires is resolved as if it were alone, then our requirements with exactly that.
    """
    wanted, pins = HOME / "vllm.in", HOME / "vllm.txt"
    # vLLM wants torch's CPU build, whose version is not on every index; any build is as good here.
    torch = HOME / "torch.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    torch.write_text(next(line for line in lines if line.startswith("torch==")) + "\n")
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


def _passes(uv: Path, part: str, takes_cuda: bool) -> bool:
    _, tests = TESTS[part.partition("-")[0]]
    venv = HOME / part
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, venv], check=True)
    pins = _resolve(uv, part, takes_cuda)
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", venv / "bin" / "python"]
    subprocess.run([*install, "--requirement", pins, "--no-deps", "--editable", "."], check=True, cwd=ROOT)
    # What is a tool and one of ours too has its version already.
    held = {line.partition("==")[0].lower() for line in pins.read_text().splitlines()}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    tools = [line for line in pinned if line.partition("==")[0].lower() in TOOLS - held]
    subprocess.run([*install, "--constraint", pins, *tools], check=True, cwd=ROOT)
    versions = subprocess.run(
        [uv, "pip", "freeze", "--python", venv / "bin" / "python"], capture_output=True, text=True, check=True
    )
    print(f"{part}: {' '.join(versions.stdout.split())}", flush=True)
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
        *tests,
    ]
    return subprocess.run(run, cwd=ROOT).returncode == 0


def _resolve(uv: Path, part: str, takes_cuda: bool) -> Path:
    """Write the versions of a part into a file, without a CUDA build of torch unless that is asked for."""
    name, _, edge = part.partition("-")
    pins = HOME / f"{part}.txt"
    words: list[str | Path] = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-annotate",
        "--python",
        sys.executable,
        "pyproject.toml",
    ]
    words += ["--resolution", RESOLUTIONS[edge], "--output-file", pins, "--no-header"]
    words += [f"--extra={extra}" for extra in TESTS[name][0]]
    pins.unlink(missing_ok=True)  # else its versions would be preferred
    subprocess.run(words, check=True, cwd=ROOT)
    lines = pins.read_text().splitlines()
    if not takes_cuda and any(line.startswith(OF_CUDA) for line in lines):
        [wanted] = [line for line in lines if line.startswith("torch==")]
        taken = HOME / "torch.txt"
        taken.write_text(f"torch=={version('torch')}\n")
        print(f"{part}: {taken.read_text().strip()}, as the index has {wanted} for CUDA alone", flush=True)
        pins.unlink()
        subprocess.run([*words, "--constraint", taken], check=True, cwd=ROOT)
    return pins


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
