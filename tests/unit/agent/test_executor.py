# SPDX-License-Identifier: Apache-2.0
"""What the executor makes of its ranks' replies. Here they are stand-ins; `test_engine.py` has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio

from agent.executor import BrokenRank, Executor
from agent.step import (
    Boot,
    FromRank,
    RankReady,
    Step,
    StepDone,
    StepWritten,
    step_address,
)
from tests.standins.api_process import tiny_config
from transfer.rank_channel import RankEnd, connect_at_once

STEP = Step(number=1, copies=(), chunks=(), tells_written=True)
START_S = 10.0


class StandInRank:
    """A rank process that says what the test has it say. It does not end."""

    returncode = None

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.name = f"rank {rank}"
        self._end: RankEnd = connect_at_once(step_address(run_dir))

    def say(self, *messages: FromRank) -> None:
        for message in messages:
            self._end.send(msgspec.msgpack.encode(message))

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def stop(self, *, grace_s: float) -> None:
        self._end.close()


@pytest_asyncio.fixture
async def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SimpleNamespace]:
    """An executor of two ranks, and those."""
    ranks: list[StandInRank] = []

    async def start(argv: list[str], stdin: bytes, name: str) -> StandInRank:
        ranks.append(rank := StandInRank(tmp_path, int(argv[-1])))
        rank.say(
            RankReady(
                rank=int(argv[-1]),
                geometry={},
                num_blocks=1,
                max_model_len=1,
                vocab_size=1,
                eos_ids=(),
                weights="",
            )
        )
        return rank

    monkeypatch.setattr("agent.executor.ChildProcess.start", start)
    executor = Executor(Boot(config=tiny_config(tmp_path, tp=2), incarnation="0" * 16), tmp_path)
    await executor.start(START_S)
    yield SimpleNamespace(executor=executor, ranks=ranks)
    await executor.close(grace_s=0)


async def test_a_step_is_written_once_every_rank_has_written_it(started: SimpleNamespace) -> None:
    """I6. One rank may be done with it before another has written it."""
    told: list[bool] = []
    one, other = started.ranks
    one.say(StepWritten(rank=0, number=1), StepDone(rank=0, number=1, drawn=((),)))
    other.say(StepWritten(rank=1, number=1), StepDone(rank=1, number=1))
    assert await started.executor.run(STEP, lambda: told.append(True)) == ((),)
    assert told == [True]


async def test_what_one_rank_has_written_is_not_said_to_be(started: SimpleNamespace) -> None:
    """I6. The other's word is of another step."""
    told: list[bool] = []
    one, other = started.ranks
    running = asyncio.ensure_future(started.executor.run(STEP, lambda: told.append(True)))
    one.say(StepWritten(rank=0, number=1), StepDone(rank=0, number=1, drawn=((),)))
    other.say(StepWritten(rank=1, number=7))
    with pytest.raises(BrokenRank, match="answered step 1"):
        await running
    assert not told
