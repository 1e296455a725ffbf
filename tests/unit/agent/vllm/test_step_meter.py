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
    """Schedules as it is told; vLLM counts tokens as computed after the connector."""

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

    def step(self, step_s: float = 0.1, *ending: str, **tokens: int) -> None:
        """A step that takes so long, with the tokens of each request, and the requests that end with it."""
        self.schedule(**tokens)
        self.run(step_s, *ending)

    def schedule(self, **tokens: int) -> None:
        self.meter.scheduled(tokens)
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count

    def run(self, step_s: float, *ending: str) -> None:
        self.now += step_s
        self.end(*ending)
        self.meter.outputs_taken()

    def end(self, *names: str) -> None:
        for name in names:
            self.meter.ended(name)


def test_a_prompt_its_tokens_and_its_end() -> None:
    vllm = Vllm()
    vllm.begin("r", 100)
    vllm.step(0.2, r=64)
    vllm.step(0.1, r=36)
    for _ in range(19):
        vllm.step(0.01, r=1)
    vllm.step(0.01, "r", r=1)
    said = vllm.meter.capacity
    assert (said.prompts, said.answers, said.answer_tokens) == (1, 1, 20)
    assert said.prefill_s == pytest.approx(0.3)
    assert said.sequence_s == pytest.approx(0.01)
    assert said.backlog_s == 0.0
    assert vllm.prompts == [(100, 0)]


def test_a_leg_that_is_to_hand_its_prompt_over_decodes_nothing() -> None:
    vllm = Vllm()
    vllm.begin("r", 100)
    vllm.step(0.1, "r", r=100)
    said = vllm.meter.capacity
    assert (said.prompts, said.answers) == (1, 0)


def test_a_prompt_that_was_fetched_is_none_of_ours() -> None:
    """Its last token is computed here, which is decoding."""
    vllm = Vllm()
    vllm.begin("r", 100, computed=99, fetches=True)
    vllm.step()  # it is being fetched: nothing to run
    vllm.now += 60.0
    for _ in range(9):
        vllm.step(0.01, r=1)
    vllm.step(0.01, "r", r=1)
    said = vllm.meter.capacity
    assert (said.prompts, said.prefill_s, said.answers, said.answer_tokens) == (0, 0.0, 1, 10)
    assert said.sequence_s == pytest.approx(0.01)


def test_one_that_could_not_be_fetched_is_work_but_no_other_prompt() -> None:
    vllm = Vllm()
    vllm.begin("r", 100, fetches=True)
    vllm.step(0.5, r=100)
    vllm.step(0.01, "r", r=1)
    said = vllm.meter.capacity
    assert (said.prompts, said.answer_tokens) == (0, 1)
    assert said.prefill_s == pytest.approx(0.5)


def test_what_was_preempted_is_computed_again_by_prefill() -> None:
    vllm = Vllm()
    vllm.begin("r", 100)
    vllm.step(0.5, r=100)
    vllm.step(0.01, r=1)
    vllm.requests["r"].num_computed_tokens = 0
    vllm.step(0.5, "r", r=101)
    said = vllm.meter.capacity
    assert (said.prompts, said.answer_tokens) == (1, 1)
    assert said.prefill_s == pytest.approx(1.0)


def test_idle_time_is_no_work() -> None:
    vllm = Vllm()
    for name in ("a", "b"):
        vllm.begin(name, 100)
        vllm.step(0.5, name, **{name: 100})
        vllm.now += 3600.0
    assert vllm.meter.capacity.prefill_s == pytest.approx(1.0)


def test_backlog_is_of_prompts_that_wait_or_are_under_way() -> None:
    vllm = Vllm()
    vllm.begin("a", 100)
    vllm.begin("b", 100)
    vllm.begin("fetched", 100, fetches=True)
    vllm.step(0.5, a=50)
    vllm.step(0.25, a=25)
    assert vllm.meter.capacity.backlog_s == pytest.approx(125 * 0.01, rel=0.01)


def test_slots_go_by_the_blocks_that_sequences_hold() -> None:
    vllm = Vllm()
    vllm.used = 100
    vllm.begin("a", 10, computed=9, fetches=True)
    vllm.begin("b", 10, computed=9, fetches=True)
    for _ in range(5):
        vllm.step(a=1, b=1)
    assert vllm.meter.capacity.slots == 20


def test_steps_that_are_scheduled_ahead_take_their_own_time() -> None:
    """Prompts among steps that decode, each step scheduled while the one before it runs."""
    vllm, names = Vllm(), [f"r{number}" for number in range(40)]
    scheduled: list[float] = []
    for count, name in enumerate(names):
        vllm.begin(name, 8192)
        steps = [(0.25, {name: 8192})]
        steps += [(0.007 + 0.00003 * count, dict.fromkeys(names[:count], 1))] * 5 if count else []
        for step_s, tokens in steps:
            vllm.schedule(**tokens)
            scheduled.append(step_s)
            if len(scheduled) == 2:
                vllm.run(scheduled.pop(0))
    vllm.run(scheduled.pop(), *names)
    said = vllm.meter.capacity
    assert (said.step_s, said.sequence_s) == pytest.approx((0.007, 0.00003), rel=0.01)
    assert said.prefill_s == pytest.approx(40 * 0.25)


def test_a_step_of_nothing_ends_like_any_other() -> None:
    """vLLM schedules one ahead of the outputs that end its last request, or while it waits for blocks."""
    vllm = Vllm()
    for name in ("a", "b"):
        vllm.begin(name, 100)
        vllm.schedule(**{name: 100})
        vllm.schedule()
        vllm.run(0.5, name)
        vllm.run(3600.0)
    assert vllm.meter.capacity.prefill_s == pytest.approx(1.0)


def test_what_vllm_does_between_steps_is_work() -> None:
    vllm = Vllm()
    vllm.begin("r", 100)
    vllm.step(0.5, r=100)
    for _ in range(20):
        vllm.now += 0.002
        vllm.step(0.008, r=1)
    vllm.end("r")
    assert vllm.meter.capacity.decode_s == pytest.approx(0.2)
