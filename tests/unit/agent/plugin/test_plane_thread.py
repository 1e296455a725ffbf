# SPDX-License-Identifier: Apache-2.0
"""The engine's process ends with the API's, and with its ranks on other hosts (I8)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from kvferry.agent.plugin import plane_thread
from kvferry.transfer.memory import own_pool
from kvferry.transfer.plane import PlaneConfig, RankAddress
from kvferry.transfer.ranks.worker import WorkerConnector
from tests.unit.transfer.rig import GEOMETRY, NUM_BLOCKS

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 30.0
HOST = "127.0.0.1"


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


def rank_elsewhere(said: Connection) -> None:
    """A rank as on another host, until it is killed."""
    pool = own_pool(torch.zeros(GEOMETRY.pool_shape(NUM_BLOCKS, 4)), GEOMETRY, 1, 0)
    rank = WorkerConnector(
        address=None, rank=0, pool=pool, transfer="tcp", bind_host=HOST, advertise_host=HOST
    )
    rank.start()
    said.send(rank.address)
    said.poll(None)


def idle_engine(said: Connection, rank: RankAddress) -> None:
    """A plane over one rank. Nothing is asked of it."""
    config = PlaneConfig(
        incarnation="i",
        bind_host=HOST,
        control_port=0,
        advertise_host=HOST,
        transfer="tcp",
        lease_s=2.0,
        geometry=GEOMETRY,
        num_blocks=NUM_BLOCKS,
        weights="w",
        host_id="h",
        rank_addresses=(rank,),
    )
    plane = plane_thread.PlaneThread(config, start_timeout_s=LIMIT_S, parent=None)
    plane.start()
    said.send("started")
    said.poll(None)
    plane.close()


@contextmanager
def over_two_hosts() -> Iterator[tuple[BaseProcess, BaseProcess, Connection]]:
    """A rank, an idle engine over it, and what tells the engine to close."""
    hears, says = SPAWN.Pipe()
    rank = SPAWN.Process(target=rank_elsewhere, args=(says,))
    rank.start()
    assert hears.poll(LIMIT_S)
    to_engine, in_engine = SPAWN.Pipe()
    engine = SPAWN.Process(target=idle_engine, args=(in_engine, hears.recv()))
    engine.start()
    try:
        assert to_engine.poll(LIMIT_S)
        assert to_engine.recv() == "started"
        yield rank, engine, to_engine
    finally:
        for process in (engine, rank):
            process.kill()
            process.join(LIMIT_S)


def test_an_idle_engine_whose_rank_on_another_host_died_ends() -> None:
    with over_two_hosts() as (rank, engine, _):
        rank.kill()
        engine.join(LIMIT_S)
        assert engine.exitcode == 1, "it lives on"


@pytest.mark.parametrize("rank_ends_first", [False, True])
def test_an_engine_that_is_stopped_ends_well(rank_ends_first: bool) -> None:
    """vLLM ends its ranks before its scheduler."""
    with over_two_hosts() as (rank, engine, to_engine):
        if rank_ends_first:
            rank.kill()
            rank.join(LIMIT_S)
        to_engine.send("close")
        engine.join(LIMIT_S)
        assert engine.exitcode == 0
