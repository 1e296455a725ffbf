# SPDX-License-Identifier: Apache-2.0
"""The engine's process ends with the API's (I8)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import time
from multiprocessing.connection import Connection

from kvferry.agent.plugin import plane_thread

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 30.0


def api(said: Connection) -> None:
    """Start an engine, and be gone before it has loaded its model."""
    SPAWN.Process(target=engine, args=(said,)).start()
    os._exit(0)


def engine(said: Connection) -> None:
    parent = plane_thread.api_process()
    assert parent is not None
    while os.getppid() == parent:
        time.sleep(0.01)
    said.send(os.getpid())
    asyncio.run(plane_thread._watch_parent(parent))


def test_an_engine_whose_api_died_while_it_loaded_ends() -> None:
    hears, says = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=api, args=(says,))
    process.start()
    assert hears.poll(LIMIT_S)
    handle = os.pidfd_open(hears.recv())
    try:
        assert select.select([handle], [], [], LIMIT_S)[0], "it lives on"
    finally:
        os.close(handle)
        process.join(LIMIT_S)
