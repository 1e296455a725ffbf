# SPDX-License-Identifier: Apache-2.0
"""Applies each seeded defect to a copy of the tree and runs the tests that must notice it.

`python -m tests.mutants` runs all of them, `--core` the short form.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.mutants.defects import Defect

ROOT = Path(__file__).parents[2]
COPIED = ("agent", "common", "proxy", "tests", "transfer")
LINKED = ("deploy", "tools", "pyproject.toml", "docs")
# A defect may make a test wait for ever.
TIMEOUT_S = 120
CONTROL_TIMEOUT_S = 600
"""All named tests, one after the other, in the tree without any defect."""
_WRONG_TREE = 77
_CHECK = """
import sys, pathlib, pytest, kvferry.agent, kvferry.proxy, kvferry.transfer
for package in (kvferry.agent, kvferry.proxy, kvferry.transfer):
    if not pathlib.Path(package.__file__).is_relative_to(pathlib.Path.cwd()):
        sys.exit(77)
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(defects: Sequence[Defect], jobs: int) -> list[Defect]:
    """Print what became of each defect. Returns those that no test noticed."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    began = time.monotonic()
    with ExitStack() as stack:
        for _ in range(jobs):
            copies.put(stack.enter_context(copied_tree()))

        def judge(defect: Defect) -> bool:
            tree = copies.get()
            try:
                return is_noticed(tree, defect)
            finally:
                copies.put(tree)

        tests = sorted({test for defect in defects for test in defect.tests})
        tree = copies.get()
        if _run_tests(tree, tests, CONTROL_TIMEOUT_S, show=True) != 0:
            raise SystemExit("the named tests fail without any defect")
        copies.put(tree)
        survivors = []
        with ThreadPoolExecutor(jobs) as pool:
            for defect, noticed in zip(defects, pool.map(judge, defects), strict=True):
                print(f"{'killed  ' if noticed else 'SURVIVED'} {defect.file}: {defect.sentence}", flush=True)
                if not noticed:
                    survivors.append(defect)
    killed = len(defects) - len(survivors)
    print(f"{killed} of {len(defects)} killed in {time.monotonic() - began:.0f} s")
    return survivors


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Make a copy of the tree in which `kvferry` means the copy."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory)
        (tree / "kvferry").mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name)
        for name in LINKED:
            (tree / name).symlink_to(ROOT / name)
        for name in ("agent", "common", "deploy", "proxy", "transfer"):
            (tree / "kvferry" / name).symlink_to(tree / name)
        (tree / "kvferry" / "models").symlink_to(tree / "deploy" / "models")
        yield tree


def is_noticed(tree: Path, defect: Defect) -> bool:
    """Apply a defect to a copy, run its tests, and undo it."""
    path = tree / defect.file
    source, before = path.read_text(), path.stat()
    if source.count(defect.old) != 1:
        raise SystemExit(f"{defect.file} has changed: {defect.sentence}")
    path.write_text(source.replace(defect.old, defect.new))
    try:
        return _run_tests(tree, defect.tests) != 0
    finally:
        path.write_text(source)
        # As before to the second: its bytecode, which was copied too, fits again.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _run_tests(tree: Path, tests: Sequence[str], timeout_s: float = TIMEOUT_S, *, show: bool = False) -> int:
    """Return pytest's exit status: 0 passed, 1 failed; a timeout counts as 1. `show` lets pytest print."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not full", "--tb", "no")
    # Bytecode of a defect could be taken for that of another one of the same size and second.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        status = subprocess.run(
            [sys.executable, "-c", _CHECK, *options, *tests],
            cwd=tree,
            env=environment,
            stdout=None if show else subprocess.DEVNULL,
            stderr=None if show else subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return 1
    if status == _WRONG_TREE or status not in (0, 1):
        raise SystemExit(f"pytest ended with status {status} in {tree}")
    return status
