# SPDX-License-Identifier: Apache-2.0
"""Ranks forked from one process that has imported what they need: in the emulated machine that takes minutes.

`python -m tests.rdma.forked_ranks --serve SOCKET` is that process. `python -m tests.rdma.forked_ranks …`,
which an engine starts as its rank, has it fork one, with the arguments, environment and files of its own, and
they end together.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.agent.config import START_TIMEOUT_S
from kvferry.agent.worker import process
from kvferry.common.child_process import die_with_parent
from tests.standins import faults

SERVER = "KVFERRY_TESTS_RANK_SERVER"
"""Environment variable: the server's socket."""
_MODULE = "tests.rdma.forked_ranks"
_STANDARD_FILES = (0, 1, 2)
_MAX_MESSAGE = 1 << 17
_PARENT = "KVFERRY_PARENT_PID"


@asynccontextmanager
async def rank_server(path: Path) -> AsyncIterator[Mapping[str, str]]:
    """Run the server; what it gives is the environment in which agents have it fork their ranks."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", _MODULE, "--serve", str(path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        assert await asyncio.wait_for(server.stdout.readline(), START_TIMEOUT_S), "it ended"
        yield {SERVER: str(path), faults.RANK_MODULE: _MODULE}
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


def serve(path: str) -> None:
    """Fork one rank for every connection, until this process is killed."""
    import kvferry.agent.worker.rank

    assert kvferry.agent.worker.rank
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, len(_STANDARD_FILES))
            if os.fork() == 0:
                listener.close()
                arguments, environment = json.loads(message)
                status = _run(connection, arguments, environment, files)
                connection.send(bytes([status]))
                os._exit(status)
            for descriptor in (connection.detach(), *files):
                os.close(descriptor)


def _run(
    connection: socket.socket, arguments: list[str], environment: dict[str, str], files: Sequence[int]
) -> int:
    """Be the rank, in a process that has just been forked. Returns its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, descriptor in zip(_STANDARD_FILES, files, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update({**environment, _PARENT: str(os.getppid())})
    sys.argv[1:] = arguments
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        return process.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except Exception:
        logging.exception("a rank has failed")
        return 1


def _end_with(connection: socket.socket) -> None:
    """The process at the other end stands for this one: what kills it kills us."""
    if not connection.recv(1):
        os.kill(os.getpid(), signal.SIGKILL)


def stand_for(arguments: Sequence[str]) -> int:
    """Have a rank forked and wait for its end. Returns its exit status; 1 when it was killed."""
    die_with_parent(os.getppid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[SERVER])
        message = json.dumps([list(arguments), dict(os.environ)]).encode()
        socket.send_fds(server, [message], _STANDARD_FILES)
        os.close(0)  # the rank reads it to its end
        return (server.recv(1) or b"\1")[0]


def main(arguments: Sequence[str]) -> int:
    if arguments[0] == "--serve":
        serve(arguments[1])
    return stand_for(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
