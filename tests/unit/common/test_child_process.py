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
from tests.helpers.deaths import assert_within
from tests.helpers.waiting import until

CHILD = "import os; from kvferry.common.child_process import die_with_parent; die_with_parent(os.getppid()); "


async def wait_gone(pid: int, timeout_s: float) -> float:
    """Seconds until the process was gone."""
    start = time.monotonic()
    await until(
        lambda: not (psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE),
        timeout_s,
    )
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
        f"    await (await ChildProcess.start(['-c', {grandchild!r}], 'late')).wait()\n"
        "asyncio.run(main())"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await until(lambda: pid_file.exists() and pid_file.read_text(), 20)
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
    child = await ChildProcess.start(
        ["-c", "import sys; sys.exit(len(sys.stdin.read()))"], "seven", stdin=b"x" * 7
    )
    assert await child.wait() == 7
    await child.stop(1.0)  # nothing left to do


async def test_a_child_that_ends_before_it_has_read_its_stdin_shows_in_wait_only() -> None:
    child = await ChildProcess.start(["-c", "raise SystemExit(5)"], "deaf", stdin=b"x" * 4_000_000)
    assert await child.wait() == 5


async def test_stop_kills_a_child_that_ignores_sigterm_and_reaps_it(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(deaf)!r}).touch()
time.sleep(60)
"""
    child = await ChildProcess.start(["-c", code], "stubborn")
    await until(lambda: deaf.exists(), 20)
    await child.stop(0.2)
    assert child.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(child.pid)


async def test_a_child_that_knows_already_is_given_its_time_and_no_signal() -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); time.sleep(0.5)"
    child = await ChildProcess.start(["-c", code], "leaving")
    await child.stop(20.0, None)
    assert child.returncode == 0


async def test_a_child_is_asked_once_however_often_it_is_to_end() -> None:
    """Our own processes take a second signal as: at once."""
    code = """
import signal, sys, time
def asked(*_):
    print("asked", flush=True)
    time.sleep(0.3)
    sys.exit(7)
signal.signal(signal.SIGINT, asked)
print("listening", flush=True)
time.sleep(60)
"""
    child = await ChildProcess.start(["-c", code], "asked", stdout=asyncio.subprocess.PIPE)
    assert await child.stdout.readline() == b"listening\n"
    child.ask_to_end(signal.SIGINT)
    await child.stop(20.0, signal.SIGINT)
    assert child.returncode == 7
    assert await child.stdout.read() == b"asked\n"


async def test_what_a_child_has_left_behind_is_ended_with_its_group() -> None:
    """A child that has ended by itself, too."""
    code = (
        "import subprocess, sys; "
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(left.pid, flush=True)"
    )
    child = await ChildProcess.start(["-c", code], "parent", stdout=asyncio.subprocess.PIPE)
    left = int(await child.stdout.readline())
    async with asyncio.timeout(20):
        while child.returncode is None:  # `wait` would wait for the pipe, too
            await asyncio.sleep(0.01)
    assert psutil.pid_exists(left)
    await child.stop(0.0, with_group=True)
    await wait_gone(left, 20.0)


async def test_a_child_that_runs_nothing_of_ours_is_ended_with_us_too() -> None:
    """And what it starts asks for its own parent: the variable by which ours do is not passed on."""
    waits = (
        "import os, time; "
        "print(os.getpid(), os.environ.get('KVFERRY_PARENT_PID'), flush=True); time.sleep(60)"
    )
    code = f"""
import asyncio, signal
from kvferry.common.child_process import ChildProcess
async def main():
    child = await ChildProcess.start(
        ["-c", {waits!r}], "stranger", stdout=asyncio.subprocess.PIPE, ends_with_us=signal.SIGKILL
    )
    print((await child.stdout.readline()).decode(), end="", flush=True)
    await child.wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid, variable = (await parent.stdout.readline()).split()
    parent.kill()
    await parent.wait()
    await wait_gone(int(pid), 20.0)
    assert variable == b"None"
