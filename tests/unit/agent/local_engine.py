# SPDX-License-Identifier: Apache-2.0
"""The engine's loop without processes: a scheduler, something that runs steps, and a stand-in connector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from kvferry.agent.engine.admission import Limits
from kvferry.agent.engine.blocks import BlockAllocator
from kvferry.agent.engine.scheduler import Scheduler
from kvferry.agent.engine.sequence import Request, Sequence
from kvferry.agent.messages.requests import (
    Output,
    RemoteKV,
    RequestFailed,
    ResumedChoice,
    SamplingParams,
    Submit,
)
from kvferry.agent.messages.steps import Step, StepOutputs
from kvferry.transfer.plane import RemotePrompt
from tests.standins.connector import StandInConnector

LIMITS = Limits(
    block_size=4,
    prefill_chunk=8,
    max_batch_tokens=24,
    max_num_seqs=6,
    max_model_len=64,
    vocab_size=50,
    max_waiting=12,
    prefix_cache=True,
    recompute_on_pull_failure=True,
    pull_timeout_s=20.0,
    eos_ids=frozenset({0}),
)


class Runner(Protocol):
    def run(self, step: Step, on_written: Callable[[], None]) -> StepOutputs | None: ...


class StandInMasks:
    """Masks that a test gives by hand."""

    def __init__(self) -> None:
        self.wanted: list[tuple[Sequence, int]] = []
        self.forgotten: list[str] = []

    def want(self, sequence: Sequence) -> None:
        if sequence.mask_wanted_at != sequence.num_outputs:
            sequence.mask_wanted_at = sequence.num_outputs
            self.wanted.append((sequence, sequence.num_outputs))

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


class LocalEngine:
    """One agent's scheduler on a clock of its own."""

    def __init__(self, runner: Runner, num_blocks: int, **limits: Any) -> None:
        self.limits = dataclasses.replace(LIMITS, **limits)
        self.allocator = BlockAllocator(num_blocks)
        self.connector = StandInConnector()
        self.masks = StandInMasks()
        self.scheduler = Scheduler(self.limits, self.allocator, self.connector, self.masks)
        self.runner = runner
        self.now = 100.0
        self.messages: dict[str, list[Output | RequestFailed]] = {}
        self.last_step: Step | None = None

    def step(self) -> bool:
        """One turn of the loop. Returns whether there was anything to compute."""
        for event in self.connector.take_events():
            self.scheduler.handle_event(event, self.now)
        self.scheduler.expire(self.now)
        step = self.last_step = self.scheduler.schedule(self.now)
        idle_for_good = step is None and self.scheduler.num_running and not self.masks.wanted
        assert not idle_for_good, "nothing would ever wake these"
        if step is not None:
            outputs = self.runner.run(step, self.scheduler.written)
            assert outputs is not None
            self.now += 0.01
            self.scheduler.commit(outputs, self.now)
        for message in self.scheduler.take_messages():
            self.messages.setdefault(message.request_id, []).append(message)
        return step is not None

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left to compute."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def submit(self, submit: Submit) -> None:
        self.scheduler.submit(submit, self.now)

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        outputs = [message for message in self.messages.get(request_id, []) if isinstance(message, Output)]
        return [token.token_id for output in outputs for token in output.tokens if token.index == choice]

    def last(self, request_id: str) -> Output | RequestFailed:
        return self.messages[request_id][-1]

    def assert_all_free(self) -> None:
        self.scheduler.check_integrity()
        assert self.allocator.counts().free == self.allocator.num_blocks


def request(request_id: str, prompt: Seq[int], **changes: Any) -> Submit:
    """A greedy request for 8 tokens; sampling settings and fields of `Submit` may be given by name."""
    fields = {name: changes.pop(name) for name in list(changes) if name in Submit.__struct_fields__}
    sampling = SamplingParams(**{"seed": 7, "max_tokens": 8, "temperature": 0.0, **changes})
    return Submit(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        **{"timeout_s": 60.0, **fields},
    )


def remote(transfer_id: str, prompt: Seq[int]) -> RemoteKV:
    return RemoteKV(
        transfer_id=transfer_id,
        source=RemotePrompt(engine_id="e" * 16, host="127.0.0.1", port=1, num_tokens=len(prompt), tp_size=1),
    )


def resumed_choices(*tokens: int) -> tuple[ResumedChoice, ...]:
    """One unfinished choice per first token."""
    return tuple(
        ResumedChoice(index=index, token_ids=(token,), finished=False) for index, token in enumerate(tokens)
    )
