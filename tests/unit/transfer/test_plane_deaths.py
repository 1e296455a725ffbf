# SPDX-License-Identifier: Apache-2.0
"""Agents that are killed and stopped, as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.transfer.agent_process import OURS, THEIRS, TOKENS
from tests.unit.transfer.rig import Agent, assert_same_kv
from tests.unit.transfer.test_plane import BACKENDS
from transfer.connector import LeaseEnded, PullDone, PullFailed, PullQuiescent, Remote

ROOT = Path(__file__).resolve().parents[3]


class OtherAgent:
    """A plane in another process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.transfer.agent_process", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other agent ended before it was ready"
        self.said: Any = json.loads(line)

    def remote(self) -> Remote:
        return msgspec.convert(self.said["remote"], Remote)

    def tell(self, order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def start_agent() -> Iterator[Callable[..., OtherAgent]]:
    started: list[OtherAgent] = []

    def start(*arguments: str) -> OtherAgent:
        started.append(OtherAgent(*arguments))
        return started[-1]

    yield start
    for agent in started:
        agent.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_producer_that_was_killed_fails_its_readers_at_once(
    start_agent: Callable[..., OtherAgent], backend: str
) -> None:
    """I5: from the broken connection, not from a timeout."""
    other = start_agent("produce", backend)
    async with Agent(transfer=backend, seed=2) as decode:
        decode.plane.pull(other.said["ids"][0], other.remote(), OURS, 0, 20.0)
        await decode.event(PullDone)
        other.signal(signal.SIGKILL)
        other.process.wait()
        begun = time.monotonic()
        decode.plane.pull(other.said["ids"][1], other.remote(), OURS, 0, 20.0)
        failed = await decode.event(PullFailed)
        assert failed.reason in ("unreachable", "read_failed")
        assert time.monotonic() - begun < 2.0
        if not failed.quiescent:
            await decode.event(PullQuiescent)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_stopped_producer_costs_the_deadline_and_serves_again_when_it_goes_on(
    start_agent: Callable[..., OtherAgent], backend: str
) -> None:
    other = start_agent("produce", backend)
    async with Agent(transfer=backend, seed=2) as decode:
        decode.plane.pull(other.said["ids"][0], other.remote(), OURS, 0, 20.0)
        await decode.event(PullDone)
        other.signal(signal.SIGSTOP)
        begun = time.monotonic()
        decode.plane.pull(other.said["ids"][1], other.remote(), OURS, 0, 0.7)
        failed = await decode.event(PullFailed)
        assert failed.reason == "deadline"
        assert time.monotonic() - begun < 2.0
        other.signal(signal.SIGCONT)
        if not failed.quiescent:
            await decode.event(PullQuiescent)
        decode.plane.pull(other.said["ids"][2], other.remote(), OURS, 0, 20.0)
        await decode.event(PullDone)
        async with Agent(seed=1) as same:
            assert_same_kv(same, THEIRS, decode, OURS)


async def test_a_consumer_that_was_killed_costs_one_lease_period(
    start_agent: Callable[..., OtherAgent],
) -> None:
    """I2. The stream is stalled, so that the reader is surely in the middle of it."""
    other = start_agent("consume")
    async with Agent(seed=1, lease_s=1.0, tcp_fault="stall:after=64") as prefill:
        renewed, unread = prefill.lend(THEIRS, TOKENS), prefill.lend([11], 4)
        other.tell({"remote": msgspec.to_builtins(prefill.remote(TOKENS)), "id": renewed})
        assert (await prefill.event(LeaseEnded)).transfer_id == unread
        with pytest.raises(TimeoutError):
            await prefill.event(LeaseEnded, timeout_s=1.5)
        other.signal(signal.SIGKILL)
        ended = await prefill.event(LeaseEnded, timeout_s=2.0)
        assert (ended.transfer_id, ended.cause) == (renewed, "expired")
        assert prefill.plane.stats().leased == 0
