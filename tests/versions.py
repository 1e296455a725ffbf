# SPDX-License-Identifier: Apache-2.0
"""Unit tests with the lowest and highest versions that pyproject.toml allows. Used by `make test-versions`.

`python -m tests.versions [PART…]`, where a part is `proxy-lowest`, `proxy-highest`, `agent-lowest`,
`agent-highest` or `beside-vllm`; all of them when none is named. Each gets an environment of its own, made by
uv, but for the last: that resolves, and installs nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.system.vllm.install import VLLM

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "versions"
TESTS = {
    "proxy": (["otel"], ["tests/unit/proxy", "--ignore", "tests/unit/proxy/dialects/test_dialect_table.py"]),
    "agent": (["agent", "otel"], ["tests/unit/agent", "tests/unit/transfer"]),
}
"""Of each part its extras, and what is run. The table of dialects needs an agent's types."""
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
    "tokenizers",
}
"""What the tests themselves need, in CI's versions."""


def main(parts: list[str]) -> int:
    """Return 1 if a part failed. Raises `CalledProcessError` when an environment cannot be made."""
    known = [*(f"{name}-{edge}" for name in TESTS for edge in RESOLUTIONS), BESIDE_VLLM]
    if unknown := set(parts) - set(known):
        print(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    uv = HOME / "uv"
    if not (uv / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", uv], check=True)
        subprocess.run([uv / "bin" / "pip", "install", "-qq", "uv"], check=True)
    program = uv / "bin" / "uv"
    failed = [
        part
        for part in parts or known
        if not (_fits_beside_vllm(program) if part == BESIDE_VLLM else _passes(program, part))
    ]
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


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
    resolved = [uv, "pip", "compile", "--quiet", "--no-annotate", "--python", sys.executable]
    resolved += ["--override", torch]
    subprocess.run([*resolved, "--output-file", pins, wanted], check=True, cwd=ROOT)
    ours = ["--constraint", pins, "--extra", "agent", "--output-file", HOME / "beside-vllm.txt"]
    return subprocess.run([*resolved, *ours, "pyproject.toml"], cwd=ROOT).returncode == 0


def _passes(uv: Path, part: str) -> bool:
    name, _, edge = part.partition("-")
    extras, tests = TESTS[name]
    venv = HOME / part
    pins = HOME / f"{part}.txt"
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, venv], check=True)
    resolved = [uv, "pip", "compile", "--quiet", "--no-annotate", "--python", venv / "bin" / "python"]
    resolved += ["--resolution", RESOLUTIONS[edge], "--output-file", pins, "pyproject.toml"]
    subprocess.run([*resolved, *(f"--extra={extra}" for extra in extras)], check=True, cwd=ROOT)
    install = [uv, "pip", "install", "--quiet", "--python", venv / "bin" / "python"]
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
    run = [
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
