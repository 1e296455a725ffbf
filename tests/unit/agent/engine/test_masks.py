# SPDX-License-Identifier: Apache-2.0
"""The process that computes masks, as the engine process sees it: a real one, which may die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvferry.agent.config import BUNDLED_MODELS
from kvferry.agent.engine import masks as masks_module
from kvferry.agent.engine.masks import MaskProcess, MaskResult
from kvferry.agent.engine.sequence import Clock, Request, Sequence
from kvferry.agent.messages.masks import MasksBoot, current_ticket_path
from tests.standins.api_process import tiny_config
from tests.standins.limited_masks import LIMITS
from tests.unit.agent.grammar.grammars import costly, regex
from tests.unit.agent.local_engine import request

MODEL = BUNDLED_MODELS / "ferry-tiny"
A, B = b"ab"
EOS = 935
WAIT_S = 30.0
LIMITED = "tests.standins.limited_masks"


class Masks:
    """A mask process that runs, and what it has given."""

    def __init__(self, process: MaskProcess, run_dir: Path, woken: asyncio.Event) -> None:
        self.process = process
        self.run_dir = run_dir
        self._woken = woken
        self._keys = 0
        self.results: dict[Sequence, MaskResult] = {}

    def want(self, grammar: str, *output_ids: int) -> Sequence:
        self._keys += 1
        submit = request(f"r{self._keys}", [1, 2, 3], grammar=grammar)
        made = Request(submit, time.monotonic() + WAIT_S, Clock(arrived=0.0), key=self._keys)
        sequence = Sequence(made, 0, [*submit.prompt_ids, *output_ids])
        self.process.want(sequence)
        return sequence

    async def result(self, sequence: Sequence) -> MaskResult:
        async with asyncio.timeout(WAIT_S):
            while sequence not in self.results:
                await self._woken.wait()
                self._woken.clear()
                self.results |= {result.sequence: result for result in self.process.take_results()}
        return self.results.pop(sequence)

    async def allowed(self, sequence: Sequence) -> set[int]:
        """Which of `A`, `B` and `EOS` may come next."""
        result = await self.result(sequence)
        assert result.failure is None, result
        assert result.position == sequence.num_outputs
        bits = np.unpackbits(np.frombuffer(result.bits, dtype=np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist()) & {A, B, EOS}

    async def failure(self, sequence: Sequence) -> tuple[int, str]:
        failure = (await self.result(sequence)).failure
        assert failure is not None
        return failure[:2]

    async def current(self) -> int:
        """The ticket that is worked on, as soon as there is one."""
        path = current_ticket_path(self.run_dir)
        async with asyncio.timeout(WAIT_S):
            while not (path.exists() and (ticket := int.from_bytes(path.read_bytes(), "little"))):
                await asyncio.sleep(0.001)
        return ticket


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if {masks_module.MASKS_MODULE, LIMITED} & set(child.cmdline())
    ]


def kill_child() -> None:
    (child,) = children()
    os.kill(child.pid, signal.SIGKILL)


@asynccontextmanager
async def running(run_dir: Path, model: Path = MODEL) -> AsyncIterator[Masks]:
    woken = asyncio.Event()
    boot = MasksBoot(config=tiny_config(model), vocab_size=936, eos_ids=(EOS,))
    process = MaskProcess(boot, run_dir, woken.set)
    task = asyncio.ensure_future(process.run())
    try:
        yield Masks(process, run_dir, woken)
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await process.close()
        assert not children()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def limit(**limits: float) -> None:
        monkeypatch.setenv(LIMITS, json.dumps(limits))
        monkeypatch.setattr(masks_module, "MASKS_MODULE", LIMITED)

    return limit


async def test_no_process_runs_before_a_mask_is_wanted(tmp_path: Path) -> None:
    async with running(tmp_path) as masks:
        await asyncio.sleep(0.05)
        assert not children()
        assert await masks.allowed(masks.want(regex("ab?"))) == {A}
        assert len(children()) == 1


async def test_a_choice_goes_on_and_after_a_death_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as masks:
        sequence = masks.want(regex("aab?"))
        assert await masks.allowed(sequence) == {A}
        sequence.tokens.append(A)
        masks.process.want(sequence)
        masks.process.want(sequence)
        assert await masks.allowed(sequence) == {A}
        kill_child()
        sequence.tokens.append(A)
        masks.process.want(sequence)
        assert await masks.allowed(sequence) == {B, EOS}


async def test_what_is_settled_was_waited_for_and_no_longer_than_told(tmp_path: Path) -> None:
    async with running(tmp_path) as masks:
        await masks.result(masks.want(regex("a")))
        sequence = masks.want(regex("b"))
        await masks.process.settle(WAIT_S)
        assert [result.sequence for result in masks.process.take_results()] == [sequence]
        slow = masks.want(costly(900))
        began = time.monotonic()
        await masks.process.settle(0.001)
        assert time.monotonic() - began < WAIT_S / 3
        await masks.process.settle(WAIT_S)  # nothing new is wanted: not waited for again
        assert time.monotonic() - began < WAIT_S / 3
        await masks.result(slow)


async def test_a_death_fails_the_request_at_work_and_no_other(tmp_path: Path) -> None:
    async with running(tmp_path) as masks:
        await masks.result(masks.want(regex("a")))
        deadly = masks.want(costly(900))
        others = [masks.want(regex("a")) for _ in range(3)]
        await masks.current()
        kill_child()
        assert await masks.failure(deadly) == (400, "grammar_too_costly")
        for other in others:
            assert await masks.allowed(other) == {A}


async def test_a_mask_that_takes_too_long_ends_the_process_and_its_request(
    tmp_path: Path, limited: Callable[..., None]
) -> None:
    limited(MAX_SINGLE_CPU_S=0.02)
    async with running(tmp_path) as masks:
        assert await masks.failure(masks.want(costly(900))) == (400, "grammar_too_costly")
        assert await masks.allowed(masks.want(regex("a"))) == {A}


async def test_a_process_that_has_grown_drops_what_it_compiled(
    tmp_path: Path, limited: Callable[..., None]
) -> None:
    limited(MAX_COMPILED_BYTES=40 << 20)
    async with running(tmp_path) as masks:
        await masks.result(masks.want(regex("a")))
        (child,) = children()
        before, most = child.memory_info().rss, 0
        for number in range(24):  # each of them takes 5 MB and more
            result = await masks.result(masks.want(costly(300 + number)))
            assert result.failure is None
            most = max(most, child.memory_info().rss - before)
        assert most < 80 << 20, most


async def test_of_a_request_that_is_over_nothing_comes(tmp_path: Path) -> None:
    async with running(tmp_path) as masks:
        gone, stays = masks.want(regex("a")), masks.want(regex("a"))
        masks.process.forget(gone.request)
        await masks.result(stays)
        assert gone not in masks.results


async def test_where_no_grammar_can_be_used_each_request_fails(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    async with running(tmp_path, model) as masks:
        for _ in range(2):
            assert await masks.failure(masks.want(regex("a"))) == (500, "grammars_failed")
