# SPDX-License-Identifier: Apache-2.0
"""One fate per agent (I8): the building blocks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from kvferry.common.child_process import ChildProcess, ParentGone
from tests.deaths import assert_within

CHILD = "import os; from kvferry.common.child_process import die_with_parent; die_with_parent(os.getppid()); "


async def wait_gone(pid: int, timeout_s: float) -> float:
    """Seconds until the process was gone."""
    start = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
    return time.monotonic() - start


async def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    grandchild = CHILD + "print(os.getpid(), flush=True); import time; time.sleep(60)"
    child = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(60)"
    )

    async def death_s() -> float:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", child, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        return await wait_gone(pid, 20.0)

    await assert_within(death_s, 1.0)


async def test_a_child_does_not_outlive_a_parent_that_died_before_the_child_first_looked(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pid"
    grandchild = (
        "import os, pathlib, time; "
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); "
        f"time.sleep(0.5); {CHILD} time.sleep(60)"
    )
    code = (
        "import asyncio; from kvferry.common.child_process import ChildProcess\n"
        "async def main():\n"
        f"    await (await ChildProcess.start(['-c', {grandchild!r}], b'', 'late')).wait()\n"
        "asyncio.run(main())"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    async with asyncio.timeout(20):
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.01)
    parent.kill()
    await parent.wait()
    await wait_gone(int(pid_file.read_text()), 20.0)


def test_a_parent_that_is_gone_already_is_an_error() -> None:
    parent = os.getppid()
    code = f"from kvferry.common.child_process import die_with_parent; die_with_parent({parent})"
    child = psutil.Popen([sys.executable, "-c", code], stderr=-1)
    _, errors = child.communicate(timeout=20)
    assert child.returncode != 0
    assert ParentGone.__name__.encode() in errors


async def test_a_child_reads_its_stdin_and_reports_its_status() -> None:
    child = await ChildProcess.start(["-c", "import sys; sys.exit(len(sys.stdin.read()))"], b"x" * 7, "seven")
    assert await child.wait() == 7
    await child.stop(1.0)  # nothing left to do


async def test_a_child_that_ends_before_it_has_read_its_stdin_shows_in_wait_only() -> None:
    child = await ChildProcess.start(["-c", "raise SystemExit(5)"], b"x" * 4_000_000, "deaf")
    assert await child.wait() == 5


async def test_stop_kills_a_child_that_ignores_sigterm_and_reaps_it(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(deaf)!r}).touch()
time.sleep(60)
"""
    child = await ChildProcess.start(["-c", code], b"", "stubborn")
    async with asyncio.timeout(20):
        while not deaf.exists():
            await asyncio.sleep(0.01)
    await child.stop(0.2)
    assert child.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(child.pid)
