# SPDX-License-Identifier: Apache-2.0
"""A whole transfer plane on the cuda_ipc backend, with a stand-in for the GPU."""

from __future__ import annotations

import asyncio
import time

import pytest

import kvferry.transfer.backends.cuda_ipc.engine as backend
from kvferry.transfer.engine import EngineOptions
from kvferry.transfer.events import PullDone
from kvferry.transfer.plane import one_group
from tests.standins.cuda_device import HostDevice
from tests.unit.transfer.agent_process import OURS, THEIRS, TOKENS
from tests.unit.transfer.rig import Agent, assert_same_kv

LEASE_S = 2.0


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[HostDevice]:
    """Every device that an engine has opened, in order."""
    opened: list[HostDevice] = []

    def open_device(pool: object, settings: object, computing: object) -> HostDevice:
        opened.append(HostDevice())
        return opened[-1]

    def open_backend(options: EngineOptions) -> backend.CudaIpcEngine:
        return backend.CudaIpcEngine(options, open_device)

    monkeypatch.setattr(backend, "open_backend", open_backend)
    return opened


async def test_a_pull_over_cuda_ipc_lands_and_a_producer_that_goes_is_unmapped(
    devices: list[HostDevice],
) -> None:
    """The rank's thread sleeps until the launch is done, without polling. The mapping of a dead producer's
    memory must end within the lease and a second.
    """
    async with Agent(transfer="cuda_ipc", seed=2, lease_s=LEASE_S) as decode:
        async with Agent(transfer="cuda_ipc", seed=1, lease_s=LEASE_S) as prefill:
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 20.0)
            done = await decode.event(PullDone)
            assert done.backend == "cuda_ipc"
            assert_same_kv(prefill, THEIRS, decode, OURS)
            reader = devices[0]
            assert len(reader.mapped) == 1
        gone = time.monotonic()
        while reader.mapped:
            assert time.monotonic() - gone < LEASE_S + 1
            await asyncio.sleep(0.01)
