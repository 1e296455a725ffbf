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

from kvferry.agent.engine.executor import BrokenRank, Executor
from kvferry.agent.messages.steps import (
    Boot,
    FromRank,
    RankReady,
    Step,
    StepDone,
    StepOutputs,
    StepWritten,
    step_address,
)
from kvferry.transfer.ranks.channel import RankConnection, RankEnd, connect_at_once
from tests.helpers.waiting import until
from tests.standins.api_process import tiny_config

STEP = Step(number=1, copies=(), chunks=(), report_written=True)
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

    async def start(argv: list[str], name: str, *, stdin: bytes) -> StandInRank:
        ranks.append(rank := StandInRank(tmp_path, int(argv[-1])))
        rank.say(
            RankReady(
                rank=int(argv[-1]),
                device="cpu",
                geometry={},
                num_blocks=1,
                max_model_len=1,
                vocab_size=1,
                eos_ids=(),
                weights="",
            )
        )
        return rank

    monkeypatch.setattr("kvferry.agent.engine.executor.ChildProcess.start", start)
    executor = Executor(Boot(config=tiny_config(tmp_path, tp=2), incarnation="0" * 16), tmp_path)
    await executor.start(START_S)
    yield SimpleNamespace(executor=executor, ranks=ranks)
    await executor.close(grace_s=0)


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> list[FromRank]:
    """What an executor has taken in, in order."""
    messages: list[FromRank] = []
    receive = Executor._receive

    async def noted(self: Executor) -> tuple[RankConnection, FromRank]:
        connection, message = await receive(self)
        messages.append(message)
        return connection, message

    monkeypatch.setattr(Executor, "_receive", noted)
    return messages


async def test_a_step_is_written_once_every_rank_has_written_it_whatever_drawing_takes(
    started: SimpleNamespace, consumed: list[FromRank]
) -> None:
    """I6. One rank may be done with a step that another has not written yet."""
    told: list[bool] = []
    one, other = started.ranks
    running = asyncio.ensure_future(started.executor.run(STEP, lambda: told.append(True)))
    one.say(StepWritten(rank=0, number=1), StepDone(rank=0, number=1, outputs=StepOutputs(sampled=((),))))
    await until(lambda: len(consumed) == 2)
    assert not told
    other.say(StepWritten(rank=1, number=1))
    await until(lambda: len(consumed) == 3)
    assert told == [True]
    assert not running.done()
    other.say(StepDone(rank=1, number=1))
    assert await running == StepOutputs(sampled=((),))
    assert told == [True]


async def test_a_rank_that_speaks_of_another_step_breaks_the_group(started: SimpleNamespace) -> None:
    started.ranks[1].say(StepWritten(rank=1, number=7))
    with pytest.raises(BrokenRank, match="replied to step 1"):
        await started.executor.run(STEP, pytest.fail)
