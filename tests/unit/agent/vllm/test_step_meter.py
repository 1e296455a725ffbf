# SPDX-License-Identifier: Apache-2.0
"""What vLLM's steps are taken for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvferry.agent.vllm.step_meter import StepMeter


@dataclass
class Request:
    """What is read of vLLM's."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0


class Vllm:
    """Schedules as it is told, a step every `step_s`; vLLM counts tokens as computed after the connector."""

    def __init__(self) -> None:
        self.now = 100.0
        self.used = 10
        self.requests: dict[str, Request] = {}
        self.prompts: list[tuple[int, int]] = []
        self.meter = StepMeter(
            64, 1000, lambda: self.used, lambda: self.now, lambda *told: self.prompts.append(told)
        )

    def begin(self, name: str, prompt: int, *, computed: int = 0, fetches: bool = False) -> None:
        self.requests[name] = Request(name, prompt, computed)
        self.meter.begun(self.requests[name], fetches=fetches)

    def step(self, step_s: float = 0.1, **tokens: int) -> None:
        self.meter.scheduled(tokens)
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        self.now += step_s

    def end(self, *names: str) -> None:
        for name in names:
            self.meter.ended(name)


def test_a_prompt_its_tokens_and_its_end() -> None:
    vllm = Vllm()
    vllm.begin("r", 100)
    vllm.step(0.2, r=64)
    vllm.step(0.1, r=36)
    for _ in range(20):
        vllm.step(0.01, r=1)
    vllm.end("r")
    said = vllm.meter.capacity
    assert (said.prompts, said.answers, said.answer_tokens) == (1, 1, 20)
    assert said.prefill_s == pytest.approx(0.3)
    assert said.sequence_s == pytest.approx(0.01)
    assert said.backlog_s == 0.0
    assert vllm.prompts == [(100, 0)]


def test_a_leg_that_is_to_hand_its_prompt_over_decodes_nothing() -> None:
    vllm = Vllm()
    vllm.begin("r", 100)
    vllm.step(r=100)
    vllm.end("r")
    said = vllm.meter.capacity
    assert (said.prompts, said.answers) == (1, 0)


def test_a_prompt_that_was_fetched_is_none_of_ours() -> None:
    """Its last token is computed here, which is decoding."""
    vllm = Vllm()
    vllm.begin("r", 100, computed=99, fetches=True)
    vllm.step()  # it is being fetched: nothing to run
    vllm.now += 60.0
    for _ in range(10):
        vllm.step(0.01, r=1)
    vllm.end("r")
    said = vllm.meter.capacity
    assert (said.prompts, said.prefill_s, said.answers, said.answer_tokens) == (0, 0.0, 1, 10)
    assert said.sequence_s == pytest.approx(0.01)


def test_one_that_could_not_be_fetched_is_work_but_no_other_prompt() -> None:
    vllm = Vllm()
    vllm.begin("r", 100, fetches=True)
    vllm.step(0.5, r=100)
    vllm.step(0.01, r=1)
    vllm.end("r")
    said = vllm.meter.capacity
    assert (said.prompts, said.answer_tokens) == (0, 1)
    assert said.prefill_s == pytest.approx(0.5)


def test_what_was_preempted_is_computed_again_by_prefill() -> None:
    vllm = Vllm()
    vllm.begin("r", 100)
    vllm.step(0.5, r=100)
    vllm.step(0.01, r=1)
    vllm.requests["r"].num_computed_tokens = 0
    vllm.step(0.5, r=101)
    vllm.end("r")
    said = vllm.meter.capacity
    assert (said.prompts, said.answer_tokens) == (1, 1)
    assert said.prefill_s == pytest.approx(1.0)


def test_idle_time_is_no_work() -> None:
    vllm = Vllm()
    for name in ("a", "b"):
        vllm.begin(name, 100)
        vllm.step(0.5, **{name: 100})
        vllm.end(name)
        vllm.now += 3600.0
    assert vllm.meter.capacity.prefill_s == pytest.approx(1.0)


def test_backlog_is_of_prompts_that_wait_or_are_under_way() -> None:
    vllm = Vllm()
    vllm.begin("a", 100)
    vllm.begin("b", 100)
    vllm.begin("fetched", 100, fetches=True)
    vllm.step(0.5, a=50)
    vllm.step(0.5, a=50)
    assert vllm.meter.capacity.backlog_s == pytest.approx(150 * 0.01, rel=0.01)


def test_slots_go_by_the_blocks_that_sequences_hold() -> None:
    vllm = Vllm()
    vllm.used = 100
    vllm.begin("a", 10, computed=9, fetches=True)
    vllm.begin("b", 10, computed=9, fetches=True)
    for _ in range(5):
        vllm.step(a=1, b=1)
    assert vllm.meter.capacity.slots == 20
