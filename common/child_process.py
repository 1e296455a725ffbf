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
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import IO, TypeAlias

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REAP_TIMEOUT_S = 5.0
# The parent's id, set by `ChildProcess.start`: the parent may die before the child can query it.
_PARENT_VARIABLE = "KVFERRY_PARENT_PID"
MAX_LINE_BYTES = 65_536
WAS_KILLED = "it was killed (SIGKILL), as the kernel does when memory runs out"
"""Why a child has ended whose exit status is that signal: its last words are of something else."""
"""Longest line of a child that is read as a line."""
Stream: TypeAlias = int | IO[bytes] | IO[str] | None


class ParentGone(RuntimeError):
    """The parent died before this process had asked to be killed with it."""


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
    _die_with(parent_pid, signum)
    # Not for the processes that this one starts.
    started_by = int(os.environ.pop(_PARENT_VARIABLE, parent_pid))
    if started_by != parent_pid:
        raise ParentGone(f"parent {started_by} is gone")


class ChildProcess:
    """One running child: its owner must await `wait()` for as long as it lives, or `stop()` it."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self.name = name
        self.is_asked = False
        """Whether it was asked to end. Our own processes take a second signal as: at once."""

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        name: str,
        *,
        stdin: bytes = b"",
        python: str | None = None,
        stdout: Stream = None,
        stderr: Stream = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        environment: Mapping[str, str] = MappingProxyType({}),
        pass_fds: Sequence[int] = (),
        ends_with_us: signal.Signals | None = None,
    ) -> ChildProcess:
        """Start this interpreter, or `python`, with `argv` (say `-m kvferry.agent.engine.process`).

        It is fed `stdin`, then EOF. The child gets a session of its own, so that Ctrl-C in a terminal reaches
        only the process that handles it. A child that ends before it has read everything shows in `wait()`.

        Args:
            stdout: Our stderr, unless given: our stdout is for the line that says where we listen, and
                nothing else.
            environment: Variables beside ours.
            ends_with_us: What the kernel is to send the child when this process dies. None for a child that
                asks for that itself, by `die_with_parent`. Not for a process whose threads may hold locks.
        """
        process = await _start(
            (python or sys.executable, *argv),
            environment,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=sys.stderr if stdout is None else stdout,
            stderr=stderr,
            limit=max_line_bytes,
            pass_fds=pass_fds,
            ends_with_us=ends_with_us,
        )
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(stdin)
                await process.stdin.drain()
            process.stdin.close()
        return cls(process, name)

    @classmethod
    async def start_serving(cls, argv: Sequence[str], name: str, max_line_bytes: int) -> ChildProcess:
        """Start this interpreter with `argv`; it is asked line by line, by `query`."""
        pipe = asyncio.subprocess.PIPE
        process = await _start((sys.executable, *argv), {}, stdin=pipe, stdout=pipe, limit=max_line_bytes)
        return cls(process, name)

    async def query(self, line: bytes) -> bytes:
        """Write a line, if it is not empty, and return the next one that the child writes.

        One caller at a time, of a child of `start_serving`. Raises `EOFError` when the child has ended.
        """
        assert self._process.stdin is not None
        if line:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._process.stdin.write(line + b"\n")
                await self._process.stdin.drain()
        answer = await self.stdout.readline()
        if not answer.endswith(b"\n"):
            raise EOFError(f"{self.name} has ended")
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> asyncio.StreamReader:
        """What it writes; for a child whose `stdout` is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> asyncio.StreamReader:
        """As `stdout`."""
        assert self._process.stderr is not None
        return self._process.stderr

    @property
    def returncode(self) -> int | None:
        """The exit status once reaped (negative: the signal it died of), None before."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the child has exited and was reaped; returns its exit status."""
        return await self._process.wait()

    def ask_to_end(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal, once, unless the child has ended; `stop` waits for it."""
        if not self.is_asked:
            self.is_asked = True
            self._signal(signum)

    def kill(self) -> None:
        """End it at once, by SIGKILL; `stop` or `wait` reaps it."""
        self._signal(signal.SIGKILL)

    async def stop(
        self, grace_s: float, signum: signal.Signals | None = signal.SIGTERM, *, with_group: bool = False
    ) -> None:
        """End the child and reap it: ask it, and kill it if it still runs after `grace_s` seconds.

        Args:
            signum: How it is asked; None for a child that knows already.
            with_group: Also kill what it has started and left behind.
        """
        if signum is not None:
            self.ask_to_end(signum)
        await self._wait_ended(grace_s)
        if with_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        await self._wait_ended(_REAP_TIMEOUT_S)

    async def _wait_ended(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()

    def _signal(self, signum: signal.Signals) -> None:
        if self._process.returncode is None:
            # Not by `send_signal`: of one that has just ended, it would take the status before asyncio does.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signum)


async def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int,
    stdout: Stream,
    limit: int,
    stderr: Stream = None,
    pass_fds: Sequence[int] = (),
    ends_with_us: signal.Signals | None = None,
) -> asyncio.subprocess.Process:
    us = os.getpid()
    # For a child that asks for its end itself. Else the processes that it starts would take it for theirs.
    parent = {_PARENT_VARIABLE: str(us)} if ends_with_us is None else {}
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        limit=limit,
        env={**os.environ, **environment, **parent},
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=None if ends_with_us is None else partial(_die_with, us, ends_with_us),
    )


def _die_with(parent_pid: int, signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when its parent dies, from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ParentGone(f"parent {parent_pid} is gone")
