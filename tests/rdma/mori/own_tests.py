# SPDX-License-Identifier: Apache-2.0
"""MORI's own tests of its I/O library, on machines without GPUs: with the stand-in, or with the real library.

    python -m tests.rdma.mori.own_tests CHECKOUT [--library] [PYTEST ARGUMENT…]

CHECKOUT is a clone of ROCm/mori; nothing of it is kept here. Tensors are placed in host memory instead of
on GPUs, and what needs GPUs besides is skipped by the tests themselves. `--library`: the package `mori`
that is installed, which takes an RDMA device (stage `mori-own` of `tests.rdma`). `--same-as REPORT`: print
every test whose verdict is not that of REPORT, a junit.xml of such a run, and return 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.standins import mori_io

FILES = ("test_transfer_wait.py", "test_engine.py", "test_engine_multi_session_batch.py")
_ON_GPU = 'torch.device("cuda", '
_GPU_HALF = ("    # Test gpu tensor\n", "    # TODO: test mem_desc pack / unpack\n")
"""Where `test_mem_desc` begins and ends to ask for a GPU."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.mori.own_tests")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--library", action="store_true")
    parser.add_argument("--same-as", type=Path, metavar="REPORT")
    asked, more = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name in FILES:
            source = (asked.checkout / "tests" / "python" / "io" / name).read_text()
            (Path(folder) / name).write_text(on_host(source))
        if not asked.library:
            stack.enter_context(mori_io.on_path())
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            "-q",
            "-rfE",
            *more,
        ]
        if asked.same_as is None:
            return subprocess.run(command, cwd=folder).returncode
        ours = Path(folder) / "junit.xml"
        subprocess.run([*command, "--junitxml", str(ours)], cwd=folder)
        return compare(verdicts(ours), verdicts(asked.same_as))


def verdicts(report: Path) -> dict[str, str]:
    """By test: passed, failed, error or skipped."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome[0] if outcome else "passed"
    return found


def compare(ours: dict[str, str], theirs: dict[str, str]) -> int:
    """Print in what two runs differ; 1 if they do, or if neither passed anything."""
    names = sorted(ours.keys() | theirs.keys())
    differing = [name for name in names if ours.get(name) != theirs.get(name)]
    for name in differing:
        print(f"{name}: {ours.get(name, 'not run')} here, {theirs.get(name, 'not run')} there")
    counts = Counter(ours[name] for name in names if name not in differing)
    print(f"the same verdict on {len(names) - len(differing)} of {len(names)} tests: {dict(counts)}")
    return 1 if differing or not counts["passed"] else 0


def on_host(source: str) -> str:
    """The test's source with its tensors in host memory."""
    if _GPU_HALF[0] in source:
        before, _, rest = source.partition(_GPU_HALF[0])
        source = before + _GPU_HALF[1] + rest.partition(_GPU_HALF[1])[2]
    lines = []
    for line in source.splitlines():
        while _ON_GPU in line:
            before, _, after = line.partition(_ON_GPU)
            line = f'{before}torch.device("cpu"){after.partition(")")[2]}'
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
