# SPDX-License-Identifier: Apache-2.0
"""Other projects' servers as processes of a test: started, waited for, stopped."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp

POLL_S = 0.2
_FIRST_PORT, _LAST_PORT = 20_000, 32_000


def free_port() -> int:
    """Return a port that nobody listens on now, for a server that cannot choose one itself.

    Such a server may bind it minutes later. So it is none of those that the kernel chooses for others.
    """
    while True:
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@asynccontextmanager
async def running_server(
    command: Sequence[str],
    environment: Mapping[str, str],
    answers_at: str,
    log: Path,
    *,
    start_timeout_s: float,
    stop_timeout_s: float,
) -> AsyncIterator[int]:
    """Start a server, wait until a URL of it answers and not with 5xx, yield its pid; stop it at the end.

    Raises `AssertionError` with the end of its log if it ends instead, and `TimeoutError`.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        async with asyncio.timeout(start_timeout_s), aiohttp.ClientSession() as http:
            while not await _answers(http, answers_at):
                assert process.returncode is None, log.read_text(errors="replace")[-4000:]
                await asyncio.sleep(POLL_S)
        yield process.pid
    finally:
        if process.returncode is None:
            family = list(descendants(process.pid))
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), stop_timeout_s)
            except TimeoutError:
                process.kill()
                await process.wait()
            for pid in family:  # one that is ended while it starts may leave them
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return response.status < 500
    except aiohttp.ClientError:
        return False


@contextmanager
def paused(processes: Iterable[int]) -> Iterator[None]:
    """Stop processes by SIGSTOP, and let those that have not been killed meanwhile go on at the end."""
    pids = list(processes)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have started."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> Iterator[int]:
    """The processes that a process has started."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it, or one of its threads, may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                yield from map(int, (task / "children").read_text().split())
