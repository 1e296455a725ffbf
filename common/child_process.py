# SPDX-License-Identifier: Apache-2.0
"""Child processes that end with their parent, and it with them (I8).

Whatever signal a process dies of: each child asks the kernel to be killed with its parent, and each parent
waits on its children and ends itself when one exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_TIMEOUT_S = 5.0
# The parent's id, set by `ChildProcess.start`: the parent may die before the child can query it.
_PARENT_VARIABLE = "KVFERRY_PARENT_PID"


class ParentGone(RuntimeError):
    """The parent died before this process had asked to be killed with it."""


def end_with_parent(signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when its parent dies, from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent dies. Call it before any slow import.

    Args:
        parent_pid: The parent as this process first saw it (`os.getppid()`).
        signum: The signal; SIGKILL cannot be handled or delayed.

    Raises:
        ParentGone: the parent died before the request took effect (or before this process first looked, if
            `ChildProcess.start` started it); no signal will come, so end now.
        OSError: the kernel refused.
    """
    end_with_parent(signum)
    started_by = int(os.environ.get(_PARENT_VARIABLE, parent_pid))
    if not os.getppid() == parent_pid == started_by:
        raise ParentGone(f"parent {started_by} is gone")


class ChildProcess:
    """One running child: its owner must await `wait()` for as long as it lives, or `stop()` it."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self.name = name

    @classmethod
    async def start(cls, argv: Sequence[str], stdin: bytes, name: str) -> ChildProcess:
        """Start this interpreter with `argv` (say `-m kvferry.agent.engine.process`) and feed it `stdin`,
        then EOF.

        The child gets a session of its own, so that Ctrl-C in a terminal reaches only the process that
        handles it. A child that ends before it has read everything shows in `wait()`.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr,  # stdout is for the line that says where the agent listens, and nothing else
            env={**os.environ, _PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(stdin)
            await process.stdin.drain()
        process.stdin.close()
        return cls(process, name)

    @classmethod
    async def start_serving(cls, argv: Sequence[str], name: str, max_line_bytes: int) -> ChildProcess:
        """Start this interpreter with `argv`; it is asked line by line, by `query`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=max_line_bytes,
            env={**os.environ, _PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
        return cls(process, name)

    async def query(self, line: bytes) -> bytes:
        """Write a line, if it is not empty, and return the next one that the child writes.

        One caller at a time, of a child of `start_serving`. Raises `EOFError` when the child has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if line:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._process.stdin.write(line + b"\n")
                await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise EOFError(f"{self.name} has ended")
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status once reaped (negative: the signal it died of), None before."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the child has exited and was reaped; returns its exit status."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """End the child and reap it: SIGTERM, and SIGKILL if it still runs after `grace_s` seconds."""
        for signum, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _REAP_TIMEOUT_S)):
            if self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):  # it exited by itself and waits to be reaped
                self._process.send_signal(signum)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._process.wait()
