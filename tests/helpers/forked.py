# SPDX-License-Identifier: Apache-2.0
"""Processes forked from one that has imported what they need, as that takes longer than most of them live."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.helpers.waiting import patient

READY_S = patient(60.0)
STOPPED_S = patient(20.0)

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.contract.serving_peer", "tests.unit.transfer.agent_process"])


class Forked:
    """A process that runs `main(connection, *arguments)`, with the environment that we have now.

    `main` first sends what it has to say, which `said` is, and returns when its connection ends.
    """

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_run, args=(dict(os.environ), main, theirs, arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._connection.poll(READY_S), "it has nothing to say"
        try:
            self.said: Any = self._connection.recv()
        except EOFError:
            raise AssertionError("it ended before it was ready") from None

    def tell(self, order: object) -> None:
        self._connection.send(order)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Stop it. On a busy machine its other threads run on until the first has heard the signal."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + STOPPED_S
        while not self._stands_still():
            assert time.monotonic() < deadline, "it runs on"
            time.sleep(0.001)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def _stands_still(self) -> bool:
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        return all(thread.read_text().rpartition(") ")[2].startswith("T") for thread in threads)

    def kill_now(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.kill_now()
        self._connection.close()


def _run(
    environment: dict[str, str], main: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    main(connection, *arguments)
