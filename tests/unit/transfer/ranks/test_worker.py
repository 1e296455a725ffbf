# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.transfer.engine import BackendUnavailable, candidates, open_engine, usable
from kvferry.transfer.events import PullDone
from kvferry.transfer.memory import own_pool
from kvferry.transfer.plane import one_group
from kvferry.transfer.ranks.worker import WorkerConnector
from tests.unit.transfer.rig import GEOMETRY, NUM_BLOCKS, Agent, idle_cost, thread_seconds
from tests.unit.transfer.test_plane import BACKENDS, OURS, THEIRS, TOKENS, needs_nixl

ROOT = Path(__file__).resolve().parents[4]


def worker(**changes: Any) -> WorkerConnector:
    settings = {
        "address": Path(tempfile.mkdtemp(), "rank"),
        "rank": 0,
        "pool": own_pool(torch.zeros(GEOMETRY.pool_shape(NUM_BLOCKS, 4)), GEOMETRY, 1, 0),
        "transfer": "tcp",
        "bind_host": "127.0.0.1",
        "advertise_host": "127.0.0.1",
    }
    return WorkerConnector(**{**settings, **changes})


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_idle_plane_costs_next_to_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R24: no spinning; after a transfer too, once no peer may come to read. Two of them are here."""
    monkeypatch.setattr("kvferry.transfer.producer.producer._HELLO_S", 0.1)
    others = thread_seconds().keys() - {threading.get_native_id()}
    async with Agent(seed=1, transfer=backend) as prefill, Agent(seed=2, transfer=backend) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        await asyncio.sleep(0.3)
        # gloo's own threads, one for each plane, wake up a hundred times a second.
        assert await idle_cost(others) < 0.05


def test_stopping_takes_no_time_and_leaves_no_thread() -> None:
    """R7."""
    before = set(threading.enumerate())
    for _ in range(3):
        connector = worker()
        connector.start()
        begun = time.monotonic()
        connector.close()
        connector.close()
        assert time.monotonic() - begun < 10.0
    # Threads that other tests left may end meanwhile: only new ones would be ours.
    assert set(threading.enumerate()) <= before


def test_a_pool_of_another_shape_is_an_error() -> None:
    """L21."""
    with pytest.raises(ValueError, match="does not fit"):
        own_pool(torch.zeros(GEOMETRY.pool_shape(NUM_BLOCKS, 2)), GEOMETRY, 1, 0)


def test_an_unknown_backend_or_option_is_named() -> None:
    with pytest.raises(ValueError, match="telepathy"):
        worker(transfer="telepathy")
    with pytest.raises(ValueError, match="melt"):
        worker(transfer="mori", transfer_options="mori.melt=1")


def test_a_backend_that_was_asked_for_and_does_not_work_is_an_error_with_the_reason() -> None:
    connector = worker(bind_host="203.0.113.1")
    with pytest.raises(BackendUnavailable, match=r"203\.0\.113\.1"):
        connector.start()
    connector.close()


def test_usable_gives_a_reason_for_every_backend_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable("tcp").ok
    monkeypatch.setitem(sys.modules, "nixl._bindings", None)  # as if it were not installed
    verdict = usable("nixl")
    assert not verdict.ok
    assert "nixl" in verdict.reason
    with pytest.raises(ValueError, match="telepathy"):
        usable("telepathy")


def test_auto_prefers_the_best() -> None:
    assert candidates("auto") == ("mori", "cuda_ipc", "nixl", "mooncake", "nccl", "tcp")
    assert candidates("tcp") == ("tcp",)
    with pytest.raises(ValueError):
        open_engine("telepathy", None)  # type: ignore[arg-type]


def test_the_engine_process_needs_no_torch() -> None:
    """Only ranks import torch; the scheduler's face comes from the same package."""
    modules = "kvferry.transfer.connector, kvferry.transfer.ranks.worker"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_broken_transfer_thread_ends_its_rank() -> None:
    """I8: a rank that can no longer transfer must not live on and strand every pull."""
    code = """
import time
from tests.unit.transfer.ranks.test_worker import worker
from kvferry.transfer.backends.tcp.engine import TcpEngine
def broken(self):
    raise RuntimeError("a bug")
TcpEngine.fileno = broken
worker().start()
time.sleep(30)
"""
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=40)
    assert ended.returncode == 1
    assert b"a bug" in ended.stderr
    assert time.monotonic() - begun < 25.0


@needs_nixl
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each side")
async def test_a_busy_interpreter_does_not_starve_the_transfer_thread() -> None:
    """docs/sources.md#nixl: beside a pure Python loop NIXL's first read took 2.4 s or never came."""
    async with Agent(seed=1, transfer="nixl") as prefill, Agent(seed=2, transfer="nixl") as decode:
        stop = threading.Event()

        def spin() -> None:
            while not stop.is_set():
                sum(range(1000))

        busy = threading.Thread(target=spin)
        busy.start()
        try:
            transfer_id = prefill.lend(THEIRS, TOKENS)
            decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
            done = await decode.event(PullDone)
        finally:
            stop.set()
            busy.join()
        assert done.wait_s + done.pull_s < 2.0
