# SPDX-License-Identifier: Apache-2.0
"""What a request costs where, and that a wrong figure changes where requests go and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.bias import FORGET_S, MeanError
from kvferry.proxy.fleet.pairing import mismatch
from kvferry.proxy.fleet.routing.candidates import Loads, Slots
from kvferry.proxy.fleet.routing.routing_request import Pair, RoutingRequest
from kvferry.proxy.fleet.snapshot import Snapshot, Speed
from kvferry.proxy.objectives import DEFAULT, ModelObjectives
from kvferry.proxy.wire.registration import Capacity, LinkUse, Register, Role, WorkReport
from tests.unit.proxy.builders import AppliedRouter, TimedRegistry, load, registration

MEASURED = Capacity(
    prompts=10, prefill_s=1.0, answers=10, answer_tokens=1000, slots=64,
    step_s=0.01, sequence_s=0.001, token_s=0.0001, backlog_s=0.0,
)  # fmt: skip
SHORT = RoutingRequest(model="m", prompt="x" * 400)
LONG = RoutingRequest(model="m", prompt="x" * 40_000)


class Stage:
    """A router over agents that report these capacities."""

    def __init__(self, objectives: ModelObjectives = DEFAULT) -> None:
        self.slots = Slots()
        self.registry = TimedRegistry(in_flight=self.slots.in_flight)
        loads = Loads(self.slots, {"prefill": None, "decode": None})
        self.router = AppliedRouter("least_work", "least_work", loads, None, objectives=objectives)
        self._pings = 1

    def ping(self, role: Role, port: int, capacity: Capacity | None = MEASURED, **fields: Any) -> Register:
        self._pings += 1
        info = registration(role, port, capacity=capacity, index=self._pings, **fields)
        self.registry.register(info)
        return info

    def route(self, request: RoutingRequest, *, keep: bool = True) -> tuple[int, int]:
        pair = self.router.route(self.registry.snapshot(), request, now=self.registry.time.now)
        assert isinstance(pair, Pair)
        if keep:
            Reservation(pair, request.n, self._free).acquire(self.slots)
        return tuple(int(node.info.address.rsplit(":", 1)[1]) for node in (pair.prefill, pair.decode))  # type: ignore[return-value]

    def _free(self, agent: Any, count: int, is_prefill: bool) -> None:
        self.slots.release(agent, count, is_prefill=is_prefill)


def test_the_queue_counts_in_seconds_and_not_in_sequences() -> None:
    stage = Stage()
    stage.ping("prefill", 100, msgspec.structs.replace(MEASURED, backlog_s=3.0), load=load(1))
    stage.ping("prefill", 101, msgspec.structs.replace(MEASURED, backlog_s=0.1), load=load(8))
    stage.ping("decode", 200)
    assert {stage.route(SHORT, keep=False)[0] for _ in range(4)} == {101}


def test_what_was_sent_since_the_last_ping_counts_until_it_is_computed() -> None:
    stage = Stage()
    for port in (100, 101):
        stage.ping("prefill", port)
    stage.ping("decode", 200)
    assert stage.route(LONG)[0] == 100
    assert [stage.route(SHORT)[0] for _ in range(3)] == [101] * 3
    stage.registry.at(2.0)  # the long prompt takes a second
    assert {stage.route(SHORT, keep=False)[0] for _ in range(4)} == {100, 101}


def test_agents_that_nothing_tells_apart_are_taken_in_turn() -> None:
    stage = Stage()
    for at in range(3):
        stage.ping("prefill", 100 + at, msgspec.structs.replace(MEASURED, token_s=0.0001 * (1 + at / 100)))
        stage.ping("decode", 200 + at, msgspec.structs.replace(MEASURED, step_s=0.01 * (1 + at / 100)))
    used = [stage.route(SHORT, keep=False) for _ in range(6)]
    assert [prefill for prefill, _ in used] == [100, 101, 102] * 2
    assert set(Counter(decode for _, decode in used).values()) == {2}


def test_of_many_agents_the_best_of_four_is_taken_and_others_at_each_turn() -> None:
    stage = Stage()
    for at in range(16):
        stage.ping("prefill", 100 + at, msgspec.structs.replace(MEASURED, backlog_s=float(at)))
    stage.ping("decode", 200)
    assert [stage.route(SHORT, keep=False)[0] for _ in range(5)] == [100, 101, 102, 103, 100]


def test_an_idle_agent_of_both_roles_serves_alone_and_one_that_decodes_much_gets_no_long_prompt() -> None:
    stage = Stage()
    stage.ping("both", 100)
    stage.ping("both", 101, load=load(20))
    assert stage.route(SHORT, keep=False) == (100, 100)
    stage.ping("both", 100, msgspec.structs.replace(MEASURED, backlog_s=0.5))
    assert stage.route(LONG, keep=False)[0] == 100


def test_a_role_that_was_given_is_kept() -> None:
    stage = Stage()
    stage.ping("prefill", 100, msgspec.structs.replace(MEASURED, backlog_s=60.0))
    stage.ping("decode", 200)
    assert stage.route(SHORT) == (100, 200)


def test_an_agent_with_a_high_share_of_prompts_is_not_taken_to_decode() -> None:
    stage = Stage()
    for now in range(30):
        stage.registry.at(float(now))
        for at, share in enumerate((0.9, 0.0)):
            done = msgspec.structs.replace(MEASURED, prefill_s=1.0 + share * now, decode_s=0.1 * now)
            stage.ping("both", 100 + at, done)
        stage.ping("prefill", 99)
    assert 0.09 < stage.registry.snapshot().nodes[1].decode_share < 0.11
    shares = {node.info.address[-3:]: node.prefill_share for node in stage.registry.snapshot().nodes}
    assert shares["100"] > 0.8 and shares["101"] == 0.0
    assert stage.route(LONG, keep=False)[1] == 101


def test_a_prompt_waits_rather_than_have_the_answers_of_others_miss_their_objective() -> None:
    """0.5 s earlier, but two answers would have no time between the chunks of a prompt of one second."""
    stage = Stage()
    stage.ping("both", 100, load=load(2))
    stage.ping("both", 101, msgspec.structs.replace(MEASURED, backlog_s=0.9))
    assert stage.route(LONG, keep=False)[0] == 101
    stage.ping("both", 101, msgspec.structs.replace(MEASURED, backlog_s=1.2))
    assert stage.route(LONG, keep=False)[0] == 100, "it would miss its own"


def test_prompts_of_other_proxies_are_no_answers_that_a_prompt_delays() -> None:
    """A prefill agent has nothing else."""
    stage = Stage()
    stage.ping("prefill", 100, msgspec.structs.replace(MEASURED, backlog_s=0.05), load=load(2))
    stage.ping("prefill", 101, msgspec.structs.replace(MEASURED, backlog_s=0.9))
    stage.ping("decode", 200)
    assert stage.route(LONG, keep=False)[0] == 100


@pytest.mark.parametrize(
    ("share", "quiet_s", "decode"), [(0.9, 0, 101), (0.0, 0, 100), (0.9, 60, 101), (0.9, 600, 100)]
)
def test_the_busier_a_fleet_is_with_prompts_the_fewer_of_its_agents_decode(
    share: float, quiet_s: int, decode: int
) -> None:
    """An agent that decodes nothing is left to the prompts, where there are many, or were until lately."""
    stage = Stage()
    for now in range(30 + quiet_s):
        stage.registry.at(float(now))
        stage.ping("both", 100)
        stage.ping("both", 101, load=load(4), steps=now)
        for port in (102, 103):
            prefill_s = 1.0 + share * min(now, 30)
            stage.ping("both", port, msgspec.structs.replace(MEASURED, prefill_s=prefill_s))
        for port in range(110, 116):
            stage.ping("both", port, None, state="starting")
        stage.route(SHORT, keep=False)
    used = {stage.route(SHORT, keep=False)[1] for _ in range(8)}
    assert decode in used and (101 in used) == (decode == 101)
    assert decode == 100 or used == {101}


def test_what_an_agent_has_not_measured_is_taken_from_another_of_its_model() -> None:
    stage = Stage()
    stage.ping("prefill", 100)
    stage.ping("prefill", 101, Capacity(step_s=5.0, sequence_s=0.1))
    speed = stage.registry.snapshot().nodes[1].speed
    assert speed == Speed(MEASURED.token_s, 5.0, 0.1, 100.0, 0.0)


def test_an_agent_whose_batches_were_all_of_one_size_does_not_tell_what_larger_ones_take() -> None:
    stage, one_size = Stage(), Capacity(step_s=0.0, sequence_s=0.02)
    stage.ping("decode", 100, one_size)
    assert stage.registry.snapshot().nodes[0].speed.sequence_s == 0.02, "nobody knows better"
    stage.ping("decode", 101)
    stage.ping("decode", 100, one_size)
    for node in stage.registry.snapshot().nodes:
        assert (node.speed.step_s, node.speed.sequence_s) == (MEASURED.step_s, MEASURED.sequence_s)


def test_a_pull_that_began_with_the_prefill_costs_what_came_after_it() -> None:
    stage = Stage()
    for tail_s, pull_s in ((0.5, 0.25), (0.0, 0.0), (None, 3.0)):
        link = LinkUse(producer="p", pulls=2, seconds=6.0, tail_s=tail_s)
        stage.ping("decode", 200, work=WorkReport(links=(link,)))
        assert stage.registry.snapshot().nodes[0].speed.pull_s == pull_s


def test_an_agent_that_takes_longer_than_predicted_gets_fewer_prompts_after_a_while() -> None:
    stage = Stage()
    for at in range(2):
        stage.ping("prefill", 100 + at)
    stage.ping("decode", 200)
    assert [stage.route(LONG, keep=False)[0] for _ in range(2)] == [100, 101]
    for at in range(200):
        stage.registry.at(at / 10)
        pair = stage.router.route(stage.registry.snapshot(), LONG, now=at / 10)
        assert isinstance(pair, Pair) and pair.prediction is not None
        factor = 3.0 if pair.prefill.info.address.endswith("100") else 1.0
        seconds = factor * 1.0  # 10,000 tokens; what it takes, however it is predicted by now
        first_token_at = pair.prediction.at + seconds
        stage.registry.record_outcome(pair.prefill, pair.decode, pair.prediction, first_token_at, 1.5 * 0.011)
        for port in (100, 101):
            stage.ping("prefill", port)
        stage.ping("decode", 200)
    slow, right, decode = (node.bias for node in stage.registry.snapshot().nodes)
    assert 1.1 < slow.prefill < 3.0 and right.prefill == pytest.approx(1.0) and slow.decode == 1.0
    assert decode.decode == pytest.approx(1.5, rel=0.05)
    assert {stage.route(LONG, keep=False)[0] for _ in range(4)} == {101}
    assert stage.route(LONG)[0] == 101
    assert stage.route(SHORT)[0] == 100


@pytest.mark.parametrize(
    ("objective_s", "of_models", "taken"),
    [
        (None, [], 100), (0.8, [], 101), (0.1, [], 100),
        (None, ["m=0.8/0.1"], 101), (2.0, ["m=0.8/0.1"], 100), (None, ["other=0.8/0.1"], 100),
    ],
    ids=["fleet's", "own", "none can keep it", "its model's", "own before its model's", "another model's"],
)  # fmt: skip
def test_agents_that_keep_the_objectives_come_before_those_that_cost_less(
    objective_s: float | None, of_models: list[str], taken: int
) -> None:
    stage = Stage(ModelObjectives(of_models=of_models))
    stage.ping("both", 100)  # 1 s, delays nobody
    fast = msgspec.structs.replace(MEASURED, token_s=0.00005, backlog_s=0.2)
    stage.ping("both", 101, fast, load=load(39))  # 0.7 s, delays others nearly beyond their objective
    stage.ping("decode", 200)
    request = RoutingRequest(model="m", prompt=LONG.prompt, ttft_s=objective_s)
    assert {stage.route(request, keep=False)[0] for _ in range(4)} == {taken}


def test_an_objective_per_token_reserves_an_agent_that_decodes_little() -> None:
    stage = Stage()
    for port, running in ((100, 0), (101, 12)):
        stage.ping("both", port, MEASURED, load=load(running))
    stage.ping("both", 100, msgspec.structs.replace(MEASURED, backlog_s=5.0))
    assert stage.route(SHORT, keep=False) == (101, 101), "22 ms per token"
    strict = RoutingRequest(model="m", prompt=SHORT.prompt, tpot_s=0.015)
    assert stage.route(strict, keep=False)[1] == 100, "11 ms per token"


@pytest.mark.parametrize("first", [0.1, 1e-300, 300.0, 5.0])
def test_a_correction_is_the_ratio_of_means_and_forgets(first: float) -> None:
    error = MeanError()
    assert error.bias(0.0) == 1.0
    ratio = error.update(first, 1.0, 1.0, 0.0)
    assert ratio is not None and 1 / 16 <= ratio <= 16
    for _ in range(500):
        bias = error.bias(0.0)
        assert error.update(2.0 * bias, 3.0, bias, 0.0) is not None
        assert 0.25 <= error.bias(0.0) <= 4.0
    assert error.bias(0.0) == pytest.approx(1.5, rel=0.01)
    assert error.update(2.0 * error.bias(0.0), 3.0, error.bias(0.0), 0.0) == pytest.approx(1.0, rel=0.01)


def test_one_request_that_took_long_changes_little_and_time_forgets_it() -> None:
    """A stall says nothing of the next request; an agent without requests would never be measured again."""
    error = MeanError()
    for _ in range(200):
        assert error.update(0.1, 0.1, error.bias(0.0), 0.0) is not None
    assert error.update(0.1, 60.0, 1.0, 0.0) == 16.0
    assert 1.0 < error.bias(0.0) < 1.5
    assert error.bias(FORGET_S * 5) == pytest.approx(1.0, abs=0.01)


FIGURES = st.one_of(
    st.none(), st.sampled_from([0.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf")]), st.floats()
)
CAPACITIES = st.none() | st.builds(
    Capacity,
    prompts=st.integers(0, 2**62), prefill_s=st.floats(), answers=st.integers(0, 2**62),
    answer_tokens=st.integers(0, 2**62), step_s=FIGURES, sequence_s=FIGURES, token_s=FIGURES,
    backlog_s=FIGURES,
)  # fmt: skip
TIMES = st.tuples(FIGURES, FIGURES)
AGENTS = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode", "both"]), CAPACITIES, st.floats(), st.integers(-5, 300)),
    min_size=1,
    max_size=12,
)


@given(times=st.lists(TIMES, max_size=8), repeated=st.integers(1, 50))
def test_a_correction_keeps_its_bounds(times: list[tuple[Any, Any]], repeated: int) -> None:
    error = MeanError()
    for predicted_s, actual_s in times * repeated:
        ratio = error.update(predicted_s or 0.0, actual_s or 0.0, error.bias(0.0), 0.0)
        assert ratio is None or 1 / 16 <= ratio <= 16
        assert 1 / 4 <= error.bias(0.0) <= 4


@settings(max_examples=200, deadline=None)
@given(agents=AGENTS, later=CAPACITIES, took=st.lists(TIMES, min_size=1, max_size=8), objectives=TIMES)
def test_a_wrong_figure_changes_where_requests_go_and_nothing_else(
    agents: list[Any],
    later: Capacity | None,
    took: list[tuple[float | None, float | None]],
    objectives: tuple[float | None, float | None],
) -> None:
    """Whatever agents report, whatever the objectives are, and however long requests take: a pair that fits
    and is ready, wherever one is without any figures; and corrections within their bounds.
    """
    stage, plain = Stage(), Stage()
    request = RoutingRequest(model="m", prompt=SHORT.prompt, ttft_s=objectives[0], tpot_s=objectives[1])
    for at, (role, capacity, _, running) in enumerate(agents):
        stage.ping(role, 100 + at, capacity, load=load(running))
        plain.ping(role, 100 + at, None, load=load(running))
    stage.registry.at(1.0)
    stage.ping(agents[0][0], 100, later)
    plain.ping(agents[0][0], 100, None)
    shot: Snapshot = stage.registry.snapshot()
    shot = shot.altered(
        replace(node, prefill_share=share) for node, (_, _, share, _) in zip(shot.nodes, agents, strict=True)
    )
    for seconds in took:
        found = stage.router.route(shot, request, now=1.0)
        expected = plain.router.route(plain.registry.snapshot(), SHORT, now=1.0)
        assert isinstance(found, Pair) == isinstance(expected, Pair)
        if isinstance(found, Pair):
            assert mismatch(found.prefill.info, found.decode.info) is None
            assert found.prefill.serves("prefill") and found.decode.serves("decode")
            Reservation(found, 1, stage._free).acquire(stage.slots)
            if found.prediction is not None:
                stage.registry.record_outcome(found.prefill, found.decode, found.prediction, *seconds)
            for at, (role, capacity, _, running) in enumerate(agents):
                stage.ping(role, 100 + at, capacity, load=load(running))
            shares = {node.incarnation: node.prefill_share for node in shot.nodes}
            shot = stage.registry.snapshot()
            assert all(1 / 4 <= each <= 4 for node in shot.nodes for each in node.bias)
            shot = shot.altered(replace(node, prefill_share=shares[node.incarnation]) for node in shot.nodes)
